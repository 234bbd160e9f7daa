"""List the layers of a network: shapes, costs, and why a layer is left out."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from decomposition.errors import DecompositionError
from decomposition.network.cost import watching
from decomposition.network.inputs import (
    ExampleInputs,
    Inputs,
    InputShape,
    InputSpec,
    example_batch,
    input_shape_of,
    run_model,
)
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import unwrapped
from decomposition.public_calls import public_call
from decomposition.registry import did_you_mean

OpaqueKind = Literal["lstm", "gru", "rnn", "attention"]
OPAQUE_KINDS: tuple[OpaqueKind, ...] = ("lstm", "gru", "rnn", "attention")
"""Kinds that plans made before they were listed have no entries for."""

OPAQUE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
OpaqueModule = nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention


def macs_of_call(module: OpaqueModule, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, int]:
    """Return the positions at which a call multiplies with the weights, and its multiply-accumulates."""
    if isinstance(module, nn.MultiheadAttention):
        names = ("query", "key", "value")
        arguments = dict(zip(names, inputs, strict=False)) | {n: keywords[n] for n in names if n in keywords}
        tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
        return tensors[0].numel() // tensors[0].shape[-1], sum(x.numel() for x in tensors) * module.embed_dim
    (x,) = (*inputs[:1], *(keywords[key] for key in ("input",) if key in keywords))
    data = x.data if isinstance(x, PackedSequence) else x
    positions = data.numel() // module.input_size
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.ndim == 2)
    return positions, positions * weights


Kind = (
    Literal[
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"
    ]
    | OpaqueKind
)
DecomposableModule = nn.Conv1d | nn.Conv2d | nn.Linear
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm
ListedModule = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed | nn.Linear

DECOMPOSABLE = (nn.Conv1d, nn.Conv2d, nn.Linear)
KINDS: dict[type[nn.Module], Kind] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Linear: "linear",
}


def is_decomposable_module(module: nn.Module) -> TypeGuard[DecomposableModule]:
    """Tell whether `module` is exactly a Conv1d, Conv2d or Linear (subclasses may mean something else)."""
    return type(module) in DECOMPOSABLE


def weight_of(module: DecomposableModule) -> torch.Tensor:
    """Return a layer's weight as float64 (out, in, kernel) on the CPU."""
    weight = module.weight.detach()
    return weight.double().cpu().reshape(weight.shape[0], weight.shape[1], -1)


class LayerTrace:
    """One forward pass that records each layer's calls and which batch norm consumes its output."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self.calls: dict[ListedModule, list[tuple[torch.Size, torch.Size]]] = {}
        self.opaque_calls: dict[OpaqueModule, list[tuple[int, int]]] = {}
        self.reached: dict[ListedModule | OpaqueModule, None] = {}
        self.uses: dict[ListedModule, list[tuple[torch.Size, torch.Size]]] = {}
        self.batch_norms: dict[nn.Module, nn.Module] = {}
        # The outputs are kept alive for the pass: an id would otherwise be reused by a later tensor.
        self._outputs: list[tuple[torch.Tensor, nn.Module]] = []

    def run(self, batch: Inputs, shape: InputShape) -> None:
        handles = []
        for module in self.names:
            if isinstance(module, ListedModule):
                handles.append(module.register_forward_hook(self._record_call))
            elif isinstance(module, OPAQUE):
                handles.append(module.register_forward_hook(self._record_opaque, with_kwargs=True))
            elif isinstance(module, BatchNorm):
                handles.append(module.register_forward_pre_hook(self._record_batch_norm))
        try:
            with watching(self.model, handles), _FunctionalUses(self):
                run_model(self.model, batch)
        except Exception as error:  # user code may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            inputs, advice = (
                f"an input of shape {shape}",
                "the shape of one real input, or a batch of real ones",
            )
            if isinstance(shape, InputSpec):
                inputs, advice = f"the inputs {shape}", "a batch of real inputs"
            raise DecompositionError(
                f"the model does not accept {inputs} (without the batch axis): {reason}; pass {advice}"
            ) from error

    def _record_call(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        tensors = [tensor for tensor in (*inputs[:1], output) if isinstance(tensor, torch.Tensor)]
        if isinstance(module, ListedModule) and len(tensors) == 2:  # a subclass may have another signature
            self.reached[module] = None
            self.calls.setdefault(module, []).append((inputs[0].shape, output.shape))
            self._outputs.append((output, module))

    def _record_opaque(
        self, module: OpaqueModule, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        self.reached[module] = None
        self.opaque_calls.setdefault(module, []).append(macs_of_call(module, inputs, keywords))

    def _record_batch_norm(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for output, producer in self._outputs:
            if output is inputs[0]:
                self.batch_norms[producer] = module


class _FunctionalUses(TorchFunctionMode):
    """Records in a trace which linear layers' weights are used by functions instead of by their layer."""

    def __init__(self, trace: LayerTrace) -> None:
        super().__init__()
        self.trace = trace
        self.owners = {id(m.weight): m for m in trace.names if isinstance(m, nn.Linear)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        output = func(*args, **keywords)
        if func is F.linear:
            x, weight = (*args[:2], *(keywords[key] for key in ("input", "weight") if key in keywords))
            self._record(weight, x, output)
        elif func is F.multi_head_attention_forward:
            weight = inspect.signature(func).bind(*args, **keywords).arguments["out_proj_weight"]
            self._record(weight, output[0], output[0])
        return output

    def _record(self, weight: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
        owner = self.owners.get(id(weight))
        if owner is not None:
            self.trace.uses.setdefault(owner, []).append((x.shape, output.shape))


FLOAT_BYTES = 4
"""Bytes of a stored parameter: files hold float32 unless a layer's `Storage` says otherwise."""


@dataclass(frozen=True)
class Storage:
    weight: int = FLOAT_BYTES
    bias: int = FLOAT_BYTES
    whole: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Shapes and costs of one layer at the model's real input size.

    Layers are convolutions, linear layers, recurrent layers, and the projections inside
    `nn.MultiheadAttention` on queries, keys and values. No format replaces the latter two; their in and out
    channels are those of the first weight.

    Attributes:
        name: Dotted name of the module; the first one where a module has several.
        index: Position in the order of the forward pass, from 0.
        kind: `conv1d`, `conv2d`, `conv3d`, `conv_transpose1d` to `conv_transpose3d`, `linear`, `lstm`, `gru`,
            `rnn` or `attention`.
        out_channels: Output channels (features of a linear layer).
        in_channels: Input channels (features of a linear layer).
        kernel_size: Spatial kernel, `()` for a linear layer.
        stride: Spatial stride, `()` for a linear layer.
        groups: Channel groups; 1 for a linear layer.
        bias: Whether the layer has a bias.
        input_sizes: Spatial size of the input at each call (the leading positions of a linear layer's input)
            for one model input; led by the number of pieces where the network cuts one input into several,
            such as windows, or puts another axis than the batch first.
        output_sizes: Spatial size of the output at each call, likewise.
        params: Parameters, bias included.
        macs: Multiply-accumulates for one model input, all calls together; also of a layer that is never
            called, but whose weight a function uses in its stead (as attention does with its `out_proj`).
        batch_norm: Name of the batch normalisation that directly receives the layer's output, if any.
        refusal: Why no format can replace the layer; `None` when it can be decomposed.
        storage: How a file keeps its parameters.
    """

    name: str
    index: int
    kind: Kind
    out_channels: int
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    bias: bool
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    params: int = 0
    macs: int = 0
    batch_norm: str | None = None
    refusal: str | None = field(default=None, compare=False)
    storage: Storage = field(default=Storage(), compare=False)

    @property
    def kernel_elements(self) -> int:
        """Number of kernel positions, 1 for a linear layer."""
        return math.prod(self.kernel_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: `(out, in / groups, *kernel)`; torch swaps out and in where transposed."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def bytes_of(self, params: int) -> int:
        """Return the bytes in a file of `params` weights and the layer's bias."""
        bias = self.out_channels if self.bias else 0
        return self.storage.weight * (params - bias) + self.storage.bias * bias

    def narrowed(self, *, inputs: int | None = None, outputs: int | None = None) -> LayerSpec:
        """Return the same layer with fewer channels; not for grouped convolutions."""
        inputs, outputs = inputs or self.in_channels, outputs or self.out_channels
        elements = inputs * outputs * self.kernel_elements
        before = self.in_channels * self.out_channels * self.kernel_elements
        return replace(
            self,
            in_channels=inputs,
            out_channels=outputs,
            params=elements + (outputs if self.bias else 0),
            macs=self.macs * elements // before,
        )

    @property
    def input_positions(self) -> int:
        """Spatial positions of the input, summed over calls."""
        return sum(math.prod(size) for size in self.input_sizes)

    @property
    def output_positions(self) -> int:
        """Spatial positions of the output, summed over calls."""
        return sum(math.prod(size) for size in self.output_sizes)


@public_call(values=False)
def inspect_layers(model: nn.Module, input_shape: ExampleInputs) -> list[LayerSpec]:
    """Describe every layer of `model` that multiplies with weights, decomposable or not, in forward order.

    These are convolutions, linear and recurrent layers and attention. One input of zeros runs through the
    model in eval mode; the model is left as it was.

    Args:
        model: Any module.
        input_shape: Shape of one input without the batch axis, or a batch of inputs: a tensor, a tuple of
            tensors that the forward takes in order, or a dict of those it takes by name.

    Returns:
        One `LayerSpec` a layer; those that no format can replace carry a `refusal`, and those that the
        forward pass never calls come last.

    Raises:
        DecompositionError: If the model does not accept an input of that shape.
    """
    model = unwrapped(model)
    trace = LayerTrace(model)
    trace.run(example_batch(model, input_shape), input_shape_of(input_shape))
    reached = trace.reached
    unreached = [m for m in trace.names if isinstance(m, ListedModule | OpaqueModule) and m not in reached]
    layers = (*reached, *unreached)
    # Embeddings count too: the last layer of a language model often shares its weight with one.
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return [
        _spec(trace, module, index, shared=owners[id(module.weight)] > 1)
        if isinstance(module, ListedModule)
        else _opaque_spec(trace, module, index)
        for index, module in enumerate(layers)
    ]


@public_call(values=False)
def compressible_layers(model: nn.Module, input_shape: ExampleInputs) -> list[LayerSpec]:
    """Return the layers of `model` that tensor formats can replace, in forward order.

    Args:
        model: Any module.
        input_shape: Shape of one input without the batch axis, for example `(3, 32, 32)`, or a batch of
            inputs, as for `inspect_layers`.

    Returns:
        The specs without a `refusal` of `inspect_layers`; `index` counts among all layers.
    """
    return [spec for spec in inspect_layers(model, input_shape) if spec.refusal is None]


def skipping(specs: Sequence[LayerSpec], skip: Sequence[str], only: Sequence[str] = ()) -> list[LayerSpec]:
    """Return the layers with a refusal on those that are to stay dense."""
    skipped, allowed = _matching("skip", specs, skip), _matching("only", specs, only)

    def refused(spec: LayerSpec) -> LayerSpec:
        reason = None
        if spec.name in skipped:
            reason = "stays as it is, as asked (skip)"
        elif only and spec.name not in allowed:
            reason = "stays as it is, because others alone may change (only)"
        return spec if reason is None or spec.refusal is not None else replace(spec, refusal=reason)

    return [refused(spec) for spec in specs]


def _matching(option: str, specs: Sequence[LayerSpec], patterns: Sequence[str]) -> set[str]:
    matches: set[str] = set()
    for pattern in patterns:
        names = {s.name for s in specs if fnmatchcase(s.name, pattern) or fnmatchcase(s.name, f"{pattern}.*")}
        if not names:
            known = [spec.name for spec in specs]
            raise DecompositionError(
                f"{option}: no layer matches {pattern!r}; the layers are {', '.join(known[:8])}"
                f"{', ...' if len(known) > 8 else ''}.{did_you_mean(pattern, known)}"
            )
        matches |= names
    return matches


def _for_one_input(shape: torch.Size, spatial: slice) -> tuple[int, ...]:
    """Return the positions in the shape that a layer sees for one model input, without the batch axis."""
    first = shape[:1] if shape[0] != 1 else ()
    return (*first, *shape[spatial])


def _spec(trace: LayerTrace, module: ListedModule, index: int, *, shared: bool) -> LayerSpec:
    name = trace.names[module]
    called = module in trace.calls
    calls = trace.calls.get(module, trace.uses.get(module, []))
    batch_norm = trace.batch_norms.get(module)
    if isinstance(module, nn.Linear):
        out_channels, in_channels, groups = module.out_features, module.in_features, 1
        kernel: tuple[int, ...] = ()
        stride: tuple[int, ...] = ()
        spatial = slice(1, -1)
    else:
        out_channels, in_channels, groups = module.out_channels, module.in_channels, module.groups
        kernel, stride = tuple(module.kernel_size), tuple(module.stride)
        spatial = slice(2, None)
    inputs = tuple(_for_one_input(i, spatial) for i, _ in calls)
    outputs = tuple(_for_one_input(o, spatial) for _, o in calls)
    # Each input element of a transposed convolution meets the kernel once; in the others, each output
    # element.
    positions = sum(math.prod(size) for size in (inputs if isinstance(module, Transposed) else outputs))
    return LayerSpec(
        name=name,
        index=index,
        kind=next(kind for base, kind in KINDS.items() if isinstance(module, base)),
        out_channels=out_channels,
        in_channels=in_channels,
        kernel_size=kernel,
        stride=stride,
        groups=groups,
        bias=module.bias is not None,
        input_sizes=inputs,
        output_sizes=outputs,
        params=sum(p.numel() for p in module.parameters()),
        macs=positions * module.weight.numel(),
        batch_norm=trace.names[batch_norm] if batch_norm is not None else None,
        refusal=_refusal(module, called=called, shared=shared),
    )


def _opaque_spec(trace: LayerTrace, module: OpaqueModule, index: int) -> LayerSpec:
    """Describe a module whose weights no format can replace: recurrent or attention."""
    calls, name = trace.opaque_calls.get(module, []), type(module).__name__
    sizes = tuple((positions,) for positions, _ in calls)
    kind: OpaqueKind
    if isinstance(module, nn.MultiheadAttention):
        kind, bias, columns = "attention", module.in_proj_bias is not None, module.embed_dim
        rows = (3 if module.in_proj_weight is not None else 1) * module.embed_dim
        refusal = f"a {name}, which may compute something else than the MultiheadAttention that it extends"
        if type(module) is nn.MultiheadAttention:
            refusal = (
                "its projections are parameters of one function; decomposition.plain_attention(model) makes "
                "linear layers of them, which can be decomposed"
            )
    else:
        kind = next((prefix for prefix in OPAQUE_KINDS if name.lower().startswith(prefix)), "rnn")
        first = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 2)
        (rows, columns), bias = first.shape, bool(module.bias)
        refusal = (
            "its weights are applied anew at every step of a sequence inside one function "
            f"({name}): an error would feed back on itself, which no fit accounts for"
        )
    return LayerSpec(
        name=trace.names[module],
        index=index,
        kind=kind,
        out_channels=rows,
        in_channels=columns,
        kernel_size=(),
        stride=(),
        groups=1,
        bias=bias,
        input_sizes=sizes,
        output_sizes=sizes,
        params=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
        macs=sum(macs for _, macs in calls),
        refusal=refusal,
    )


_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, prune.BasePruningMethod)


def computes_weights(module: nn.Module) -> bool:
    """Tell whether `plain_weights` would change a layer; rounded weights do not count."""
    return bool(weight_hooks(module)) or (parametrize.is_parametrized(module) and not is_rounded(module))


def weight_hooks(module: nn.Module) -> list[Any]:
    """List the older hooks of torch that compute a layer's weight at every call."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


def _refusal(module: ListedModule, *, called: bool, shared: bool) -> str | None:
    name = type(module).__name__
    if computes_weights(module):
        return (
            "its weight is computed anew at every call (weight_norm, prune, ...); "
            "decomposition.plain_weights(model) makes it a parameter of its present value"
        )
    if type(module) not in KINDS:
        base = next(kind.__name__ for kind in KINDS if isinstance(module, kind))
        way = "; decomposition.plain_layers lets it in if it does not"
        return (
            f"a {name}, which may compute something else than the {base} that it extends"
            f"{way if isinstance(module, DECOMPOSABLE) and called else ''}"
        )
    if "weight" not in module._parameters:
        return "its weight is no parameter of its own; make it one first"
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d) and module.groups == 1:
        return f"a {name}; decomposition.plain_transposed(model) gives it a layer that can be decomposed"
    if not is_decomposable_module(module):
        return f"a {name}; only Conv1d, Conv2d and Linear can be decomposed"
    if not called:
        return "its forward is never called, so its inputs are unknown"
    if not isinstance(module, nn.Linear) and module.groups > 1:
        return f"grouped convolution (groups={module.groups}); only groups=1 can be decomposed"
    if shared:
        return "its weight tensor belongs to another layer too"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}, not a floating-point tensor"
    return None
