"""The learning rates that the operators adjust by the update count T."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Return R_adjusted of Adam: R * sqrt(1 - beta^T) / (1 - alpha^T) where T > 0, R where T = 0.

    Args:
        counts: Update counts T, one or more.
        like: A tensor that has the device and dtype wanted of tensor rates.
        lr: Learning rate R.
        alpha: Decay of the accumulated gradient, in [0, 1).
        beta: Decay of the accumulated squared gradient, in [0, 1).

    Returns:
        One rate per count: floats for integers, tensors for tensors, which never leave their device.
        Both are computed in float64: at T = 1 and beta = 0.999, 1 - beta^T loses four digits in float32.
    """
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
    """Return r of Adagrad: R / (1 + T * decay_factor).

    Args:
        counts: Update counts T, one or more.
        like: A tensor that has the device and dtype wanted of tensor rates.
        lr: Learning rate R.
        decay_factor: Decay of the learning rate, >= 0.

    Returns:
        One rate per count: floats for integers, tensors for tensors, computed in float64.
    """
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
