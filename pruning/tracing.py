"""Walk the channels: run the network once, with the label of its channel on every number.

A copy of the network runs on an example input, and a torch function mode watches every operation.
Convolutions and linear layers make new labels, operations on single channels pass labels on, additions join
them, and operations that move numbers move their labels. Channels that reach any other operation are
protected.
"""

from __future__ import annotations

import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pruning.channel_walk import (
    CHANGING,
    FACTORIES,
    VALUE_READERS,
    Call,
    ChannelCount,
    ChannelWalk,
    calling_frame,
    is_networks_own,
    is_of_torch,
    label_axes,
    label_row,
    labels_in,
    line_of,
    rooted,
)
from pruning.copies import copied, fresh_input, plain_network
from pruning.errors import PruningError
from pruning.label_rules import LAYERS, FunctionLabels, LayerLabels, calls_with_its_own, leaves
from pruning.masks import JOINT_NORMS


def walk_channels(model: nn.Module, example_input: torch.Tensor) -> ChannelWalk:
    """Run a copy of `model` and label every channel."""
    network = copied(plain_network(model)).eval()
    walker = _Walker(network)
    title = type(network).__name__
    try:
        with torch.no_grad():
            walker.run(fresh_input(example_input))
    except PruningError:
        raise
    except Exception as error:  # a network may raise anything
        shape, cause = tuple(example_input.shape), str(error).partition("\n")[0]
        raise PruningError(
            f"{title} fails on an example input of shape {shape}{_raised_at(error)}: {cause}"
        ) from error
    return walker.walk


class _Walker(TorchFunctionMode):
    """Runs a network and labels the channels of every tensor that comes of its input."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.walk = ChannelWalk()
        self._network = network
        self._layers = LayerLabels(self.walk, network)
        self._functions = FunctionLabels(self.walk)
        # Tensors in neither of the two are constants: they do not depend on the input.
        self._arrays: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._from_input: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # The tensors that enter the running operation; None while labels are computed.
        self._entering: set[int] | None = set()
        self._running: list[tuple[str, nn.Module]] = [("", network)]
        self._held: dict[int, list[tuple[str, str, nn.Module]]] = {}
        for name, module in network.named_modules():
            if name:
                module.forward = functools.partial(self._enter, name, module, module.forward)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._held.setdefault(id(tensor), []).append((name, key, module))

    def run(self, example_input: Tensor) -> None:
        """Run the network and label everything."""
        channels = example_input.shape[1] if example_input.ndim > 1 else 1
        labels = self.walk.labels.new(channels, "it is the network's input")
        axis = min(1, example_input.ndim - 1)
        self._keep(example_input, label_row(labels, axis, example_input.ndim), True)
        # Nothing is compiled unless torch._dynamo is loaded; loading it would take a second.
        compiled = "torch._dynamo" in sys.modules
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            _Unseen(self.unseen),
            self,
        ):
            output = self._network(example_input)
        self._layers.count_calls()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor in self._arrays:
                self._protect([self._arrays[tensor]], "its channels are the network's output")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        outer, self._entering = self._entering, None
        try:
            return self._labelled(Call(_name(func), func, args, dict(kwargs or {}), *self._running[-1]))
        finally:
            self._entering = outer

    def _labelled(self, call: Call) -> Any:
        """Run an operation and label its outputs."""
        entering = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        from_input = any(tensor in self._from_input for tensor in entering)
        if call.name in VALUE_READERS and from_input:
            raise PruningError(
                f"{type(self._network).__name__} reads the values of a tensor by {call.title}, and they may "
                "decide what runs; compute with tensors alone (torch.where), or prune its parts one by one"
            )
        with _unwatched():
            layer = self._layer(call)
            for tensor in entering[:1] if layer or call.name in JOINT_NORMS else entering:
                array = self._array(tensor, call)
                if array is not None:
                    call.arrays[id(tensor)] = array, tensor.shape
        self._entering = {id(tensor) for tensor in entering}
        value = call.function(*call.args, **call.kwargs)
        self._entering = None
        with _unwatched():
            if not call.arrays or call.name in FACTORIES:
                self._functions.fix_counts(call)
                return value
            if call.name in ("shape", "size", "numel"):
                return self._counts(call, value)
            outputs = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
            if not outputs:
                if call.name in CHANGING:
                    self._protect(call.own_arrays, f"it is written to or from by {call.title}")
                return value
            arrays = self._layers.output(call, *layer) if layer else self._functions.outputs(call, outputs)
            if arrays is None:
                obstacle = self._protect(
                    call.own_arrays,
                    f"its output goes through {call.title}, which is not known to keep channels apart",
                )
                arrays = [self._fixed(tensor, obstacle) for tensor in outputs]
            for tensor, array in zip(outputs, arrays, strict=True):
                self._keep(tensor, array, from_input)
            return value

    def unseen(self, operation: object, operands: Iterable[Any]) -> None:
        """Protect the channels of tensors that reach an operation unobserved."""
        seen = self._entering
        for tensor in operands if seen is not None else ():
            if isinstance(tensor, Tensor) and id(tensor) not in (seen or ()) and tensor in self._from_input:
                reason = f"its output goes through {operation}, called in a way that cannot be followed"
                self._protect([self._arrays[tensor]], reason)

    def _enter(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._running.append((name, module))
        try:
            return forward(*args, **kwargs)
        finally:
            self._running.pop()

    def _keep(self, tensor: Tensor, array: Tensor, from_input: bool) -> None:
        self._arrays[tensor] = array
        if from_input:
            self._from_input[tensor] = True

    def _protect(self, arrays: Iterable[Tensor], obstacle: str) -> str:
        """Protect channels; return the obstacle, or an earlier one if all of them had one."""
        labels = [label for array in arrays for label in labels_in(array)]
        earlier = [self.walk.labels.obstacle(label) for label in labels]
        self.walk.labels.protect(labels, obstacle)
        return obstacle if None in earlier or not earlier else str(earlier[0])

    def _fixed(self, tensor: Tensor, obstacle: str) -> Tensor:
        (label,) = self.walk.labels.new(1, obstacle)
        return torch.full((1,) * tensor.ndim, label)

    def _layer(self, call: Call) -> tuple[str, nn.Module] | None:
        """Return the name and module of the layer that makes this call with its own weight."""
        if not isinstance(call.module, LAYERS.get(call.name, ())) or not call.args:
            return None
        return (call.owner, call.module) if calls_with_its_own(call) else None

    def _array(self, tensor: Tensor, call: Call) -> Tensor | None:
        """Return the label array of a tensor; parameters and buffers get theirs when they are first used."""
        if tensor not in self._arrays and id(tensor) in self._held and tensor.is_floating_point():
            self._arrays[tensor] = self._held_array(tensor, call)
        array = self._arrays.get(tensor)
        return None if array is None else rooted(array, self.walk.labels)

    def _held_array(self, tensor: Tensor, call: Call) -> Tensor:
        """Return the label array of a parameter or buffer that is used outside of torch's own layers."""
        holders = self._held[id(tensor)]
        axes = label_axes(tensor)
        names = [f"{name}.{key}" if name else key for name, key, _ in holders]
        layers = [name for name, _, module in holders if isinstance(module, tuple(LAYERS.values()))]
        for layer in layers:
            self._layers.protect(layer, f"{names[0]!r} is used by {call.title}")
        if len(names) > 1 or layers or len(axes) != 1:
            return self._fixed(tensor, f"it is combined with the tensor {names[0]!r}")
        labels = self.walk.labels.new(tensor.shape[axes[0]])
        self.walk.vectors[names[0]] = labels
        return label_row(labels, axes[0], tensor.ndim)

    def _counts(self, call: Call, value: Any) -> Any:
        """Return a shape, or the size of an axis, whose channel counts are `ChannelCount`s."""
        ((array, shape),) = call.arrays.values()
        sizes = [self._count(array, axis, size) for axis, size in enumerate(shape)]
        if call.name == "numel":
            return math.prod(sizes)
        axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
        return torch.Size(sizes) if axis is None else sizes[axis]

    def _count(self, array: Tensor, axis: int, size: int) -> int:
        if array.shape[axis] == 1 or all(self.walk.labels.obstacle(label) for label in labels_in(array)):
            return size

        def fix(arrays: Iterable[Tensor]) -> None:
            frame = calling_frame()
            if frame is not None and not is_of_torch(frame):
                self._protect(arrays, f"the number of its channels is used{line_of(frame)}")

        return ChannelCount.of(size, [array], lambda removal: removal.count(array, axis), fix)


class _Unseen(TorchDispatchMode):
    """Reports every dispatched operation, including those that a transform calls."""

    def __init__(self, report: Callable[[object, Iterable[Any]], None]) -> None:
        super().__init__()
        self._report = report

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping torch.compile would load it, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._report(func, leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _unwatched() -> AbstractContextManager[None]:
    """Return a context without dispatch modes, for the walk's own operations on labels."""
    return torch._C._DisableTorchDispatch()


def _name(function: Callable[..., Any]) -> str:
    """Return the name of an operation; that of an attribute is the attribute's."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


def _raised_at(error: BaseException) -> str:
    """Return the last line of the network's own code that an error went through."""
    lines = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if is_networks_own(frame)]
    return line_of(lines[-1]) if lines else ""
