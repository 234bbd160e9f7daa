"""Read a layer's weight as a tensor: in plain modes, or with channel counts split into small factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decomposition.errors import DecompositionError
from decomposition.network.layers import LayerSpec

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
