"""Selection of input channels: the channels that the others reconstruct best are removed first.

A channel that goes is replaced by the best linear combination of those that stay, and the layer's weight
takes that combination on. To second order the output loses tr(G W_b P_bb^-1 W_b') with it: P is the inverse
of the inputs' second moments, b the channel's columns (one for each position of the kernel), W the weight as
it stands and G the sensitivity of the network's output. Channels go a few at a time, the cheapest first, and
the weight is solved for anew: the optimal brain surgeon (Hassibi & Stork, NIPS 1992) with a channel in place
of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from decomposition.calibration.metric import Metric, times, whole
from decomposition.calibration.sensitivity_root import floored

# Share of the inputs' mean power that no combination of other channels is taken to explain.
_RIDGE = 1e-3
# One in so many of the remaining channels goes at a time, before the weight is solved for anew.
_AT_A_TIME = 32


@dataclass(frozen=True)
class Selection:
    """A layer that reads only some of its input channels."""

    reads: tuple[int, ...]
    weight: torch.Tensor
    error: float


@dataclass(frozen=True)
class Narrowing:
    """How many input channels a layer may read, and which layer then loses the others."""

    producer: str
    counts: tuple[int, ...]


def select_inputs(
    weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None, counts: Iterable[int]
) -> dict[int, Selection]:
    """Select the input channels that a layer reads best, for several numbers of them.

    A smaller selection is part of every larger one.
    """
    outputs, channels, kernel = weight.shape
    original = weight.double().flatten(1)
    columns = channels * kernel
    moments = torch.eye(columns, dtype=torch.float64) if metric is None else whole(metric).double()
    g = torch.eye(outputs, dtype=torch.float64) if sensitivity is None else floored(sensitivity)
    regularised = moments.clone()
    regularised.diagonal().add_(_RIDGE * float(moments.diagonal().mean()) or 1e-30)
    precision = torch.linalg.inv(regularised)
    solved = original.clone()
    power = float(((g @ times(original, moments)) * original).sum())
    staying = torch.ones(channels, dtype=torch.bool)
    selections: dict[int, Selection] = {}
    for count in sorted(set(counts), reverse=True):
        while (left := int(staying.sum())) > count:
            losses = _losses(solved, precision, g, channels)
            number = min(left - count, max(1, left // _AT_A_TIME))
            going = losses.masked_fill(~staying, float("inf")).topk(number, largest=False).indices
            index = (going[:, None] * kernel + torch.arange(kernel)).flatten()
            gone = precision[index]
            share = torch.linalg.solve(gone[:, index], gone)
            solved -= solved[:, index] @ share
            precision -= gone.T @ share
            staying[going] = False
            for matrix in (solved.T, precision, precision.T):
                matrix[index] = 0
        change = original - solved
        lost = float(((g @ times(change, moments)) * change).sum())
        error = (max(0.0, lost) / power) ** 0.5 if power > 0 else 0.0
        reads = tuple(staying.nonzero().flatten().tolist())
        selections[count] = Selection(reads, solved.reshape(weight.shape).clone(), error)
    return selections


def _losses(weight: torch.Tensor, precision: torch.Tensor, g: torch.Tensor, channels: int) -> torch.Tensor:
    """Return tr(G W_b P_bb^-1 W_b') of each channel b, shape (channels,)."""
    kernel = weight.shape[1] // channels
    blocks = precision.reshape(channels, kernel, channels, kernel)
    own = blocks[torch.arange(channels), :, torch.arange(channels)]
    own = own + (own.diagonal(dim1=1, dim2=2).sum(1) == 0)[:, None, None] * torch.eye(kernel)  # those gone
    parts = weight.reshape(-1, channels, kernel).transpose(0, 1)
    weighted = (g @ weight).reshape(-1, channels, kernel).transpose(0, 1)
    products: torch.Tensor = weighted.transpose(1, 2) @ parts
    return torch.linalg.solve(own, products).diagonal(dim1=1, dim2=2).sum(1)
