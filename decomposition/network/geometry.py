"""Describe the geometry of layers, sample the patches they read, and read weights as tensors in modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.layers import DecomposableModule, LayerSpec


@dataclass(frozen=True)
class Geometry:
    """Channels, kernel, stride, padding and dilation of a Conv1d, Conv2d or Linear."""

    out_channels: int
    in_channels: int
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros"
    bias: bool = False

    @classmethod
    def of(cls, module: DecomposableModule) -> Geometry:
        if isinstance(module, nn.Linear):
            return cls(module.out_features, module.in_features, bias=module.bias is not None)
        return cls(
            module.out_channels,
            module.in_channels,
            tuple(module.kernel_size),
            tuple(module.stride),
            module.padding if isinstance(module.padding, str) else tuple(module.padding),
            tuple(module.dilation),
            module.padding_mode,
            module.bias is not None,
        )

    @property
    def spatial(self) -> int:
        """Number of spatial dimensions, 0 for a linear layer."""
        return len(self.kernel_size)

    def along(self, axis: int) -> Geometry:
        """Restrict the geometry to one spatial axis: kernel 1, stride 1, no padding along the others."""

        def only(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
            return tuple(value if j == axis else otherwise for j, value in enumerate(values))

        padding = self.padding if isinstance(self.padding, str) else only(self.padding, 0)
        return replace(
            self,
            kernel_size=only(self.kernel_size, 1),
            stride=only(self.stride, 1),
            padding=padding,
            dilation=only(self.dilation, 1),
        )

    def layer(self, inputs: int, outputs: int, *, bias: bool, groups: int = 1, **like: Any) -> nn.Module:
        """Make a layer with this kernel, stride and padding but other channels."""
        if self.spatial == 0:
            return nn.Linear(inputs, outputs, bias=bias, **like)
        convolution = nn.Conv1d if self.spatial == 1 else nn.Conv2d
        return convolution(
            inputs,
            outputs,
            self.kernel_size,  # type: ignore[arg-type]
            stride=self.stride,  # type: ignore[arg-type]
            padding=self.padding,  # type: ignore[arg-type]
            dilation=self.dilation,  # type: ignore[arg-type]
            groups=groups,
            bias=bias,
            padding_mode=self.padding_mode,
            **like,
        )

    def pointwise(self, inputs: int, outputs: int, *, bias: bool, **like: Any) -> nn.Module:
        """Make a layer that mixes channels at every position: kernel and stride 1, no padding."""
        if self.spatial == 0:
            return nn.Linear(inputs, outputs, bias=bias, **like)
        convolution = nn.Conv1d if self.spatial == 1 else nn.Conv2d
        return convolution(inputs, outputs, 1, bias=bias, **like)

    def dense(self, **like: Any) -> DecomposableModule:
        layer = self.layer(self.in_channels, self.out_channels, bias=self.bias, **like)
        return cast(DecomposableModule, layer)

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve `x` with a weight (outputs, inputs, kernel elements) of any channel counts."""
        if self.spatial == 0:
            return F.linear(x, weight.squeeze(-1), bias)
        convolve = F.conv1d if self.spatial == 1 else F.conv2d
        kernel = weight.reshape(*weight.shape[:2], *self.kernel_size)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = padded_input(self, x), (0,) * self.spatial
        return convolve(x, kernel, bias, self.stride, padding, self.dilation)

    def mix(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Mix the channels of `x` with a matrix (outputs, inputs) at every position."""
        if self.spatial == 0:
            return F.linear(x, weight, bias)
        convolve = F.conv1d if self.spatial == 1 else F.conv2d
        return convolve(x, weight.reshape(*weight.shape, *(1,) * self.spatial), bias)


def padded_input(module: nn.Conv1d | nn.Conv2d | Geometry, x: torch.Tensor) -> torch.Tensor:
    """Pad `x` (N, C, *spatial) the way the convolution does, whatever its padding and padding mode."""
    spatial = len(module.kernel_size)
    if module.padding == "valid":
        return x
    if isinstance(module.padding, str):  # 'same': the surplus element goes to the end
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before_after = [(total // 2, total - total // 2) for total in totals]
    else:
        before_after = [(p, p) for p in module.padding]
    widths = [width for pair in reversed(before_after[:spatial]) for width in pair]
    if not any(widths):
        return x
    return F.pad(x, widths, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def patch_view(module: nn.Conv1d | nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """View a padded input (N, C, *spatial) as patches (N, *output spatial, C, *kernel), without copying."""
    spatial = len(module.kernel_size)
    outputs = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    ]
    strides = x.stride()
    steps = [strides[2 + j] * module.stride[j] for j in range(spatial)]
    taps = [strides[2 + j] * module.dilation[j] for j in range(spatial)]
    return x.as_strided(
        (x.shape[0], *outputs, x.shape[1], *module.kernel_size), (strides[0], *steps, strides[1], *taps)
    )


def sample_labelled_patches(
    module: DecomposableModule, inputs: list[torch.Tensor], count: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw the same random patches from several inputs of one layer, with the input each is from."""
    linear = isinstance(module, nn.Linear)
    views = [
        x.reshape(-1, x.shape[-1])
        if isinstance(module, nn.Linear)
        else patch_view(module, padded_input(module, x))
        for x in inputs
    ]
    positions = views[0].shape[:1] if linear else views[0].shape[: 1 + len(module.kernel_size)]  # type: ignore[arg-type]
    total = positions.numel()
    patches_per_input = max(1, total // max(1, len(inputs[0])))
    if total <= count:
        labels = torch.arange(total, device=views[0].device) // patches_per_input
        columns = math.prod(views[0].shape[len(positions) :])
        return [view.reshape(total, columns) for view in views], labels
    drawn = torch.randint(total, (count,), generator=generator).to(views[0].device)
    order = drawn.argsort()  # reading neighbours in order shares cache lines
    index, places = torch.unravel_index(drawn[order], positions), order.argsort()
    patches = [view[index].reshape(count, -1).index_select(0, places) for view in views]
    return patches, drawn // patches_per_input


def labels_of_batch(labels: torch.Tensor, axis: int, batch: int) -> torch.Tensor:
    """Return the index of the input that each patch is from."""
    return labels // (axis // batch) if axis and axis % batch == 0 else labels


LARGEST_FACTOR = 8


@dataclass(frozen=True)
class WeightModes:
    """The tensor modes of a weight of shape (out, in, *kernel).

    Attributes:
        out: Factors of the output channels; `(64,)` when plain, `(4, 4, 4)` when tensorised.
        inp: Factors of the input channels.
        kernel: Kernel positions, 1 for linear layers and 1x1 convolutions.
        kernel_size: The kernel along each axis, (height, width) of a Conv2d, for formats that split it;
            `()` for a linear layer. Left out, the positions count as one axis.

    Raises:
        DecompositionError: If `kernel_size` does not multiply to `kernel`.
    """

    out: tuple[int, ...]
    inp: tuple[int, ...]
    kernel: int
    kernel_size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.kernel_size and self.kernel > 1:
            object.__setattr__(self, "kernel_size", (self.kernel,))
        if math.prod(self.kernel_size) != self.kernel:
            raise DecompositionError(
                f"a kernel of size {self.kernel_size} has {math.prod(self.kernel_size)} positions, "
                f"not {self.kernel}; give sizes whose product is the number of positions"
            )

    @property
    def out_channels(self) -> int:
        """Output channels."""
        return math.prod(self.out)

    @property
    def in_channels(self) -> int:
        """Input channels."""
        return math.prod(self.inp)

    @property
    def columns(self) -> int:
        """Columns of the weight's matrix (out, in * kernel)."""
        return self.in_channels * self.kernel

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return self.out_channels * self.columns

    @property
    def plain(self) -> bool:
        """Whether no channel count is split."""
        return len(self.out) == 1 and len(self.inp) == 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """All mode sizes in order: output factors, input factors, kernel (left out where it is 1)."""
        return (*self.out, *self.inp, *((self.kernel,) if self.kernel > 1 else ()))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description of the channel factors."""
        return {"out": list(self.out), "in": list(self.inp)}


def plain_modes(spec: LayerSpec) -> WeightModes:
    """Return the modes (out, in, kernel) of a layer's weight."""
    return _modes(spec, (spec.out_channels,), (spec.in_channels // spec.groups,))


def tensorised_modes(spec: LayerSpec) -> WeightModes:
    """Split the channel counts into small factors, 64 into 4x4x4 (Wang et al. 2018, Tensor Ring Nets)."""
    return _modes(spec, factorise(spec.out_channels), factorise(spec.in_channels // spec.groups))


def factorise(channels: int) -> tuple[int, ...]:
    """Split a channel count into near-equal factors of at most 8 where its primes allow."""
    primes, rest, divisor = [], channels, 2
    while rest > 1:
        while rest % divisor == 0:
            primes.append(divisor)
            rest //= divisor
        divisor += 1 if divisor * divisor <= rest else max(1, rest - divisor)
    count = max(1, round(math.log(channels, 4))) if channels > 1 else 1
    factors = sorted(primes, reverse=True) or [1]
    while len(factors) > count or (len(factors) > 1 and factors[-1] * factors[-2] <= 4):
        merged = factors[-1] * factors[-2]
        if merged > LARGEST_FACTOR:
            break
        factors = sorted([*factors[:-2], merged], reverse=True)
    return tuple(factors)


def modes_from_dict(spec: LayerSpec, factors: dict[str, Sequence[int]] | None) -> WeightModes:
    """Read the channel factors of a plan entry and check them against the layer."""
    if factors is None:
        return plain_modes(spec)
    modes = _modes(spec, tuple(factors["out"]), tuple(factors["in"]))
    expected = plain_modes(spec)
    if (modes.out_channels, modes.in_channels) != (expected.out_channels, expected.in_channels):
        raise DecompositionError(
            f"layer {spec.name!r}: the factors {modes.to_dict()} do not multiply to its channels "
            f"(out {expected.out_channels}, in {expected.in_channels}); correct them or drop them"
        )
    return modes


def _modes(spec: LayerSpec, out: tuple[int, ...], inp: tuple[int, ...]) -> WeightModes:
    return WeightModes(out, inp, spec.kernel_elements, spec.kernel_size)
