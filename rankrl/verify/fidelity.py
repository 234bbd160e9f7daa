"""Whether a network that was read and rewritten still computes what the original does, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

AnyArray = TypeVar("AnyArray", "np.ndarray[Any, np.dtype[Any]]", torch.Tensor)
Array = np.ndarray[Any, np.dtype[Any]]

FLOOR = 1e-4
"""The relative error of outputs in float32 that is always allowed: sums in another order."""
COARSE_FLOOR = 2e-2
"""The same where a network rounds by itself: to half precision, or to integers."""
_TIMES_NOISE = 30.0


def departure(
    names: Sequence[str],
    known: Sequence[Array],
    noisy: Sequence[Sequence[Array]],
    computed: Sequence[Array],
    *,
    floor: float = FLOOR,
) -> str | None:
    """Return how far outputs are off, if they are further than rounding explains, else None."""
    for name, expected, value, *others in zip(names, known, computed, *noisy, strict=True):
        allowed = max(floor, *(_TIMES_NOISE * relative_error(expected, other) for other in others))
        error = relative_error(expected, value)
        if not error <= allowed:  # also true of NaN
            return f"the output {name!r} differs by {error:.2e}, where rounding explains {allowed:.0e}"
    return None


def nudged(x: AnyArray) -> AnyArray:
    """Return an input that is different by a few roundings: numbers of 32 bits and more by a millionth."""
    wide = x.dtype in (np.float32, np.float64, torch.float32, torch.float64)
    return x * (1 + 1e-6) if wide else x


def relative_error(expected: Array, computed: Array) -> float:
    """Return |found - expected| / |expected|; of integers and truth values the share that differs.

    It is infinite where shapes differ, or where a number is finite in one of them alone.
    """
    if expected.shape != computed.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    if expected.dtype.kind not in "f" or computed.dtype.kind not in "f":
        return float(np.mean(expected != computed))
    expected, computed = expected.astype(np.float64), computed.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(computed)):
        return float("inf")
    lost, whole = (np.linalg.norm(each) for each in (computed[finite] - expected[finite], expected[finite]))
    return float(lost / whole) if whole > 0 else float(lost)
