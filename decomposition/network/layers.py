"""Which layers of a model there are, what they cost and which of them can be decomposed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.inputs import (
    ExampleInputs,
    example_batch,
    input_shape_of,
)
from decomposition.network.kinds import (
    DECOMPOSABLE,
    KINDS,
    Kind,
    ListedModule,
    Transposed,
    is_decomposable_module,
)
from decomposition.network.layer_trace import LayerTrace
from decomposition.network.opaque import OpaqueModule, opaque
from decomposition.network.permanent_weights import computes_weights
from decomposition.network.wrappers import unwrapped
from decomposition.public_calls import public_call
from decomposition.registry import did_you_mean

FLOAT_BYTES = 4
"""Bytes of a stored parameter: files hold float32 unless a layer's `Storage` says otherwise."""


@dataclass(frozen=True)
class Storage:
    """How a file keeps the parameters of a layer."""

    weight: int = FLOAT_BYTES
    bias: int = FLOAT_BYTES
    whole: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What is known of one layer at the model's real input size.

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
        """Return what weights of so many parameters and the bias take in a file, together."""
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
    # Any module may share it: the weight of a language model's last layer is often that of its embedding.
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
    """Return the layers, refusing those that are to stay as they are."""
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
    """Return the names of the layers that match any of the patterns."""
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
    description, calls = opaque(module), trace.opaque_calls.get(module, [])
    sizes = tuple((positions,) for positions, _ in calls)
    return LayerSpec(
        name=trace.names[module],
        index=index,
        kind=description.kind,
        out_channels=description.out_features,
        in_channels=description.in_features,
        kernel_size=(),
        stride=(),
        groups=1,
        bias=description.bias,
        input_sizes=sizes,
        output_sizes=sizes,
        params=description.params,
        macs=sum(macs for _, macs in calls),
        refusal=description.refusal,
    )


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
