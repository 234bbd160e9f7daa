"""The channel walk: one traced run of the network in which every tensor carries its channel labels.

The network is traced with torch.fx and run once on an example input. Convolutions and linear layers give out
fresh labels, channelwise operations hand labels on, additions join them, concatenations line them up,
flattening repeats them once per pixel, and zero padding of channels (the option-A shortcut of He et al. 2016,
section 4.1) surrounds them with fresh ones. Whatever is not understood protects the channels that reach it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pruning.errors import PruningError
from pruning.labels import ChannelLabels, Labels
from pruning.operations import (
    BATCH_NORMS,
    CHANNELWISE_FUNCTIONS,
    CHANNELWISE_METHODS,
    CHANNELWISE_MODULES,
    CONCATENATIONS,
    CONVOLUTIONS,
    ELEMENTWISE_FUNCTIONS,
    ELEMENTWISE_METHODS,
    REDUCTION_FUNCTIONS,
    REDUCTION_METHODS,
    holds_tensor,
    pad_arguments,
    slices_pixels_only,
    spares_channels,
)


@dataclass(frozen=True)
class ChannelPad:
    """A module that pads channels with zeros: the labels it puts before and after the ones it receives."""

    before: Labels
    after: Labels


@dataclass
class ChannelWalk:
    """Everything the walk has seen, by layer name in order of execution.

    Attributes:
        labels: the union-find behind all labels.
        producers: labels of the output channels of each dense convolution and linear layer.
        readers: labels of the input channels (or features) of the same layers.
        batch_norms: labels of the channels of each batch normalisation.
        depthwise: labels of the input and of the output channels of each depthwise convolution.
        pads: the modules that pad channels with zeros.
    """

    labels: ChannelLabels = field(default_factory=ChannelLabels)
    producers: dict[str, Labels] = field(default_factory=dict)
    readers: dict[str, Labels] = field(default_factory=dict)
    batch_norms: dict[str, Labels] = field(default_factory=dict)
    depthwise: dict[str, tuple[Labels, Labels]] = field(default_factory=dict)
    pads: dict[str, ChannelPad] = field(default_factory=dict)


def walk_channels(model: nn.Module, example_input: torch.Tensor) -> ChannelWalk:
    """Trace `model` and label every channel.

    Args:
        model: a network of one tensor input; it is neither run nor changed (a copy is).
        example_input: a batch that the network accepts, channels on axis 1.

    Raises:
        PruningError: if torch.fx cannot trace the network, or it fails on the example input.
    """
    model = copy.deepcopy(model).eval()
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # torch.fx raises many types for code that depends on the data
        raise PruningError(
            f"{type(model).__name__} cannot be traced by torch.fx ({error}); "
            "move control flow that depends on the data into a module of its own"
        ) from error
    walker = _Walker(model, graph)
    try:
        with torch.no_grad():
            walker.run(example_input)
    except (RuntimeError, TypeError, ValueError) as error:
        shape, cause = tuple(example_input.shape), str(error).partition("\n")[0]
        raise PruningError(
            f"{type(model).__name__} fails on an example input of shape {shape}: {cause}"
        ) from error
    return walker.walk


class _Tracer(fx.Tracer):
    """Stops at torch's layers and at childless modules with parameters of their own (opaque layers)."""

    def is_leaf(self, m: nn.Module, module_qualified_name: str) -> bool:
        opaque = bool(m._parameters) and not m._modules
        return opaque or bool(super().is_leaf(m, module_qualified_name))  # type: ignore[misc]


class _Walker(fx.Interpreter):
    """Runs the traced graph and labels the channels of each value."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(model, graph))
        self.walk = ChannelWalk()
        self._labels = self.walk.labels
        self._known: dict[fx.Node, Labels] = {}
        self._shapes: dict[fx.Node, torch.Size] = {}
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self._calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._shared = _layers_with_shared_parameters(model)
        self._pad_owners = Counter(_owner(node) for node in graph.nodes if node.target is F.pad)

    def run_node(self, n: fx.Node) -> Any:
        values = self.fetch_args_kwargs_from_env(n)
        value = super().run_node(n)
        labels = self._label(n, values, value)
        if isinstance(value, torch.Tensor):
            self._known[n] = labels if labels is not None else self._opaque(n, value)
            self._shapes[n] = value.shape
        return value

    def _label(self, node: fx.Node, values: tuple[Any, Any], value: Any) -> Labels | None:
        """Return the labels of `value`, or None if what `node` does is not understood."""
        if node.op == "placeholder":
            return self._fresh(value, "it is the network's input")
        if node.op == "output":
            self._protect_inputs(node, "its channels are the network's output")
            return None
        if not isinstance(value, torch.Tensor):
            if holds_tensor(value):
                self._protect_inputs(node, f"its output is split by {_title(node)}")
            return None
        if node.op == "get_attr":
            return self._fresh(value, f"it is combined with the tensor {node.target!r}")
        if node.op == "call_module":
            return self._label_module(node, value)
        return self._label_function(node, *values, value)

    def _label_module(self, node: fx.Node, value: torch.Tensor) -> Labels | None:
        name = str(node.target)
        module = self._modules[name]
        entry = self._input(node)
        if entry is None:
            return None
        labels, received = entry
        if type(module) in CHANNELWISE_MODULES:
            return labels
        if isinstance(module, nn.PReLU) and module.num_parameters == 1:
            return labels
        if isinstance(module, nn.Flatten):
            return self._flatten(labels, received, value)
        if type(module) not in (*CONVOLUTIONS, *BATCH_NORMS, nn.Linear):
            return None
        return self._label_layer(name, module, labels, received, value)

    def _label_layer(
        self, name: str, module: nn.Module, labels: Labels, received: torch.Size, value: torch.Tensor
    ) -> Labels | None:
        walk = self.walk
        obstacle = self._layer_obstacle(name, module, received)
        if obstacle is not None:
            self._labels.protect(labels, obstacle)
        if isinstance(module, BATCH_NORMS):
            walk.batch_norms[name] = labels
            return labels
        if isinstance(module, CONVOLUTIONS):
            groups, channels, outputs = int(module.groups), int(module.in_channels), int(module.out_channels)  # type: ignore[arg-type]
            if groups == channels and groups > 1:
                repeat = outputs // channels
                out = tuple(label for label in labels for _ in range(repeat))
                walk.depthwise[name] = (labels, out)
                return out
        else:
            outputs = int(module.out_features)  # type: ignore[arg-type]
        walk.readers[name] = labels
        # A layer that is called twice keeps the labels of its first call: they describe the same weights.
        walk.producers.setdefault(name, self._labels.new(outputs, obstacle))
        if obstacle is not None and isinstance(module, nn.Linear) and len(received) != 2:
            return self._fresh(value, obstacle)  # axis 1 does not count the layer's features
        return walk.producers[name]

    def _layer_obstacle(self, name: str, module: nn.Module, received: torch.Size) -> str | None:
        """Return why the channels that enter and leave this layer must stay, if they must."""
        if self._calls[name] > 1:
            return f"{name!r} is shared: it is called {self._calls[name]} times in one forward pass"
        if name in self._shared:
            return f"{name!r} shares a parameter with {self._shared[name]!r}"
        if module._parameters.get("weight") is None and not isinstance(module, BATCH_NORMS):
            return f"the weight of {name!r} is parametrised; remove the parametrisation first"
        if isinstance(module, nn.Linear) and len(received) != 2:
            return f"{name!r} is a linear layer on {len(received)}-dimensional input"
        if isinstance(module, CONVOLUTIONS):
            groups = int(module.groups)  # type: ignore[arg-type]
            if groups not in (1, module.in_channels):
                return f"{name!r} is a grouped convolution (groups={groups}): its groups must stay equal"
            if len(received) != module.weight.ndim:
                return f"{name!r} is a convolution on input without a batch axis"
        return None

    def _label_function(self, node: fx.Node, args: Any, kwargs: Any, value: torch.Tensor) -> Labels | None:
        target = node.target
        if target in ELEMENTWISE_FUNCTIONS or (node.op == "call_method" and target in ELEMENTWISE_METHODS):
            return self._elementwise(node, value)
        if target in CONCATENATIONS:
            return self._concatenation(node, args, kwargs)
        entry = self._input(node)
        if entry is None:
            return None
        labels, received = entry
        by_name = node.op == "call_method"
        if target in CHANNELWISE_FUNCTIONS or (by_name and target in CHANNELWISE_METHODS):
            return labels
        if target is F.pad:
            return self._pad(node, labels, received, value)
        if (node.op, target) == ("call_function", torch.flatten) or (by_name and target == "flatten"):
            return self._flatten(labels, received, value)
        if target is torch.reshape or (by_name and target in ("view", "reshape")):
            return self._reshape(node, labels, received, value)
        if target in REDUCTION_FUNCTIONS or (by_name and target in REDUCTION_METHODS):
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return labels if spares_channels(dims, len(received)) else None
        if target is torch.squeeze or (by_name and target == "squeeze"):
            # Without dimensions, or over axis 1, a single channel would go as well.
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return labels if spares_channels(dims, len(received)) else None
        if getattr(target, "__name__", "") == "getitem":
            return labels if slices_pixels_only(args[1]) and value.shape[:2] == received[:2] else None
        return None

    def _elementwise(self, node: fx.Node, value: torch.Tensor) -> Labels | None:
        if value.ndim < 2:
            return None
        joined: Labels | None = None
        for operand in node.all_input_nodes:
            if operand not in self._known:
                # A number computed from a shape might be the number of channels.
                return None
            labels, shape = self._known[operand], self._shapes[operand]
            axis = 1 - (value.ndim - len(shape))
            if axis == 1 and shape[1] == value.shape[1]:
                joined = labels if joined is None else self._labels.join(joined, labels)
            elif axis < 0 or shape[axis] == 1:
                # One channel broadcast over all (an attention map): it must stay, the others may go.
                self._labels.protect(labels, f"its output is broadcast over channels by {_title(node)}")
            else:
                return None
        return joined

    def _concatenation(self, node: fx.Node, args: Any, kwargs: Any) -> Labels | None:
        tensors = args[0] if args else kwargs["tensors"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        if dim % tensors[0].ndim != 1 or not isinstance(parts, list | tuple):
            return None
        return tuple(label for part in parts if isinstance(part, fx.Node) for label in self._known[part])

    def _flatten(self, labels: Labels, received: torch.Size, value: torch.Tensor) -> Labels | None:
        if value.shape[:2] == received[:2]:
            return labels
        pixels = math.prod(received[2:])
        if value.ndim != 2 or value.shape[0] != received[0]:
            return None
        return tuple(label for label in labels for _ in range(pixels))

    def _reshape(
        self, node: fx.Node, labels: Labels, received: torch.Size, value: torch.Tensor
    ) -> Labels | None:
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
            sizes = tuple(sizes[0])
        # A literal number of features would contradict the pruned network's.
        if len(sizes) != 2 or (isinstance(sizes[1], int) and sizes[1] != -1):
            return None
        return self._flatten(labels, received, value)

    def _pad(self, node: fx.Node, labels: Labels, received: torch.Size, value: torch.Tensor) -> Labels | None:
        widths, mode, fill = pad_arguments(node)
        if any(not isinstance(width, int) for width in widths):
            return labels if value.shape[:2] == received[:2] else None
        pair = 2 * (len(received) - 2)
        if not any(widths[pair:]):
            return labels
        before, after = widths[pair], widths[pair + 1]
        if len(widths) > pair + 2 or mode != "constant" or fill not in (None, 0) or min(before, after) < 0:
            return None
        owner = _owner(node)
        module = self._modules.get(owner)
        if (
            module is None
            or owner == ""
            or module._modules
            or module._parameters
            or self._pad_owners[owner] > 1
        ):
            where = f"{owner or 'the network'}.forward"
            obstacle = f"its channels are padded inside {where}; put that padding into a module of its own"
            self._labels.protect(labels, obstacle)
            return self._fresh(value, obstacle)
        site = ChannelPad(self._labels.new(before), self._labels.new(after))
        self.walk.pads[owner] = site
        return (*site.before, *labels, *site.after)

    def _input(self, node: fx.Node) -> tuple[Labels, torch.Size] | None:
        """Return the labels and the shape of the one tensor that enters `node`, None if there are several."""
        operands = [operand for operand in node.all_input_nodes if operand in self._known]
        return (self._known[operands[0]], self._shapes[operands[0]]) if len(operands) == 1 else None

    def _opaque(self, node: fx.Node, value: torch.Tensor) -> Labels:
        """Protect everything that enters `node` and return protected labels for what leaves it."""
        obstacle = f"its output goes through {_title(node)}, which is not known to keep channels apart"
        self._protect_inputs(node, obstacle)
        return self._fresh(value, obstacle)

    def _fresh(self, value: torch.Tensor, obstacle: str) -> Labels:
        return self._labels.new(value.shape[1] if value.ndim > 1 else 0, obstacle)

    def _protect_inputs(self, node: fx.Node, obstacle: str) -> None:
        for operand in node.all_input_nodes:
            self._labels.protect(self._known.get(operand, ()), obstacle)


def _layers_with_shared_parameters(model: nn.Module) -> dict[str, str]:
    """Return each layer that holds another layer's parameter, with the name of that other layer."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            other = first.setdefault(id(parameter), name)
            if other != name:
                shared[name], shared[other] = other, name
    return shared


def _owner(node: fx.Node) -> str:
    """Return the name of the innermost module whose forward holds `node`."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _title(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"the layer {node.target!r}"
    return f"{getattr(node.target, '__name__', node.target)!s} in {_owner(node) or 'the network'}.forward"
