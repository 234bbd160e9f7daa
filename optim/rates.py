"""Compute the learning rates that the operators adjust by the update count T."""

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
