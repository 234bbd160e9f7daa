"""Check the settings of optimizers, and compute the rate of a step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor

Count = int | Tensor
"""An update count T: a Python integer, or an integer tensor of no dimension, all of a list of one kind."""

Rate = float | Tensor
"""A learning rate: a Python float, or a tensor of no dimension, all of a list of one kind."""


def adam_rates(
    counts: Sequence[Count], like: Tensor, *, lr: float | Tensor, alpha: float, beta: float
) -> list[Rate]:
    """Return R_adjusted of Adam: R * sqrt(1 - beta^T) / (1 - alpha^T) where T > 0, R where T = 0."""
    if isinstance(counts[0], Tensor):
        t, r = _stack(counts, lr)
        adjusted = r * torch.sqrt(1 - torch.pow(beta, t)) / (1 - torch.pow(alpha, t))
        return _unstack(torch.where(t > 0, adjusted, r), like)
    scalar = float(lr)
    rates: dict[Count, Rate] = {}
    for count in cast("set[int]", set(counts)):  # nearly always one
        corrected = scalar * math.sqrt(1 - beta**count) / (1 - alpha**count) if count > 0 else scalar
        rates[count] = corrected
    return [rates[count] for count in counts]


def adagrad_rates(
    counts: Sequence[Count], like: Tensor, *, lr: float | Tensor, decay_factor: float
) -> list[Rate]:
    """Return r of Adagrad: R / (1 + T * decay_factor)."""
    if isinstance(counts[0], Tensor):
        t, r = _stack(counts, lr)
        return _unstack(r / (1 + t * decay_factor), like)
    return [float(lr) / (1 + count * decay_factor) for count in counts]


def _stack(counts: Sequence[Count], lr: float | Tensor) -> tuple[Tensor, Tensor]:
    t = torch.stack(cast("list[Tensor]", list(counts))).double()
    r = lr.detach().reshape(()).to(t) if isinstance(lr, Tensor) else torch.full_like(t, lr)
    return t, r


def _unstack(rates: Tensor, like: Tensor) -> list[Rate]:
    return list(rates.to(like).unbind())


OPERATOR_DTYPES = (torch.float32, torch.float64)


class SparseGradientError(TypeError, RuntimeError):
    """A sparse gradient was met; also a RuntimeError, as torch's own optimizers raise."""


def round_to_float32(value: float) -> float:
    """Return the float32 nearest to `value`, as a Python float (infinite beyond the range of float32)."""
    return ctypes.c_float(value).value


def check_rate(name: str, value: object) -> float | Tensor:
    """Check a learning rate (the operators' input R, a float or double scalar: not rounded)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} is a tensor of shape {tuple(value.shape)}: give one element, or a float"
            )
        if not value.is_floating_point():
            raise TypeError(f"{name} is a tensor of {value.dtype}: give a floating-point tensor, or a float")
        _non_negative(name, float(value))
        return value
    return _non_negative(name, value)


def check_coefficient(name: str, value: object) -> float:
    """Check an attribute that is a finite number >= 0 and round it to float32."""
    number = _non_negative(name, value)
    rounded = round_to_float32(number)
    if math.isinf(rounded) or (rounded == 0.0) != (number == 0.0):
        raise ValueError(
            f"{name} is {number!r}, which float32 cannot hold: the operators' attributes are float32, "
            "give 0 or a number from 1.5e-45 to 3.4e38"
        )
    return rounded


def check_decay(name: str, value: object) -> float:
    """Check a coefficient of an exponential average, in [0, 1) after it has been rounded to float32."""
    rounded = check_coefficient(name, value)
    if rounded >= 1.0:
        raise ValueError(f"{name} is {value!r}: as a float32 it must be in [0, 1), at most 0.99999994")
    return rounded


def check_update_count(name: str, value: object) -> int:
    """Check an update count (the operators' input T, an int64 scalar)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give an integer >= 0, usually 0 or 1")
    if value < 0:
        raise ValueError(f"{name} is {value}: give an integer >= 0, usually 0 or 1")
    return int(value)


def check_params(params: Sequence[Tensor]) -> None:
    """Check that parameters have a type the operators know."""
    for index, tensor in enumerate(params):
        if tensor.dtype not in OPERATOR_DTYPES:
            advice = (
                "keep float32 masters: train the float32 model under torch.autocast, or optimize a float32 "
                "copy and copy it back after each step"
                if tensor.is_floating_point()
                else "convert it to float32, or leave it out"
            )
            raise TypeError(
                f"params[{index}] is {tensor.dtype} of shape {tuple(tensor.shape)}: the operators of "
                f"ai.onnx.preview.training know float32 and float64 only; {advice}"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"params[{index}] has the layout {tensor.layout}: give a dense (strided) tensor")


def check_keys(what: str, entries: Mapping[str, object], needed: Sequence[str]) -> None:
    """Check that a mapping holds every needed key."""
    missing = [key for key in needed if key not in entries]
    if missing:
        raise ValueError(
            f"{what} lacks {', '.join(missing)} (it holds {', '.join(map(str, entries))}): "
            "was it saved by another optimizer?"
        )


def _non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give a finite number >= 0")
    number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{name} is {number}: give a finite number >= 0")
    return number
