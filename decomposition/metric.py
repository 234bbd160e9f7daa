"""Second-moment matrices E[x x'] of inputs: whole, or as few rows whose products they are.

A linear layer behind a flattened map has tens of thousands of inputs D, and a matrix D x D would not fit into
memory; but it is calibrated on fewer inputs n than that, and F'F with F (n, D) is the same matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowFactor:
    """The matrix F'F.

    Attributes:
        rows: F, shape (n, D), float64.
    """

    rows: torch.Tensor


Metric = torch.Tensor | RowFactor
"""E[x x'], shape (D, D), float64."""


def worth_factoring(count: int, columns: int) -> bool:
    """Tell whether `count` rows take less memory and time than the matrix (columns, columns)."""
    return 2 * count < columns


def times(rows: torch.Tensor, metric: Metric) -> torch.Tensor:
    """Return rows @ metric for rows (m, D)."""
    if isinstance(metric, RowFactor):
        return (rows @ metric.rows.T) @ metric.rows
    return rows @ metric


def scaled(metric: Metric, factor: torch.Tensor | float) -> Metric:
    """Return factor * metric, in float64."""
    if isinstance(metric, RowFactor):
        return RowFactor(metric.rows.double() * factor**0.5)
    return metric.double() * factor


def is_finite(metric: Metric) -> bool:
    """Tell whether no entry is NaN or infinite."""
    return bool(torch.isfinite(metric.rows if isinstance(metric, RowFactor) else metric).all())


def channel_moments(metric: Metric, channels: int, kernel: int) -> torch.Tensor:
    """Average the second moments of the channels (channels, channels) over the kernel's positions."""
    if isinstance(metric, RowFactor):
        patches = metric.rows.reshape(-1, channels, kernel)
        return torch.einsum("nik,njk->ij", patches, patches) / kernel
    return torch.einsum("ikjk->ij", metric.reshape(channels, kernel, channels, kernel)) / kernel


def to_bytes(metric: Metric) -> bytes:
    """Return the numbers, for hashing."""
    return (metric.rows if isinstance(metric, RowFactor) else metric).contiguous().numpy().tobytes()
