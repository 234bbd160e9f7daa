"""How much of an estimated matrix of second moments to believe.

A matrix E[x x'] that is estimated from few inputs lacks energy in directions that were merely not seen yet,
and a fit is unconstrained there. Ledoit & Wolf ("A well-conditioned estimator for large-dimensional
covariance matrices", J. Multivariate Analysis 88, 2004, section 3) mix it with the scaled identity, in the
proportion that minimises the expected squared error. Apart from the matrix, the formula needs how much its
summands differ. The summand here is one model input with all its patches: neighbouring patches of an image
are much alike, and counting them as independent would promise more knowledge than there is.
"""

from __future__ import annotations

import torch

from decomposition.calibration.metric import Metric, columns, squared_norm, trace

_BLOCK = 2**24


class Spread:
    """Sums that tell how much the inputs' shares of a second-moment matrix differ."""

    def __init__(self) -> None:
        self._rows = 0
        self._squared_rows = 0.0
        self._squares = 0.0

    def add(self, rows: torch.Tensor, labels: torch.Tensor, mean: torch.Tensor | None = None) -> None:
        """Add patches.

        Shapes: rows (n, D), mean (D,).
        """
        counts = labels.cpu().bincount().to(labels.device)
        self._rows += len(rows)
        self._squared_rows += float(counts.double().square().sum())
        self._squares += _squared_norms(rows, labels, counts, mean)

    def shrinkage(self, metric: Metric, scale: float | None = None) -> float:
        """Return the proportion of the identity, from 0 to 1 (b^2 / d^2 in the paper)."""
        scale = 1 / self._rows if scale is None else scale
        size = squared_norm(metric)
        distance = size - trace(metric) ** 2 / columns(metric)
        variance = self._squares * scale**2 - size * self._squared_rows / self._rows**2
        if not distance > 0:  # the identity already
            return 0.0
        return min(max(variance / distance, 0.0), 1.0)


def shrinkage(
    rows: torch.Tensor, labels: torch.Tensor, metric: Metric, mean: torch.Tensor | None = None
) -> float:
    """Return the proportion of the identity for the matrix E[x x'] of some patches, from 0 to 1.

    Shapes: rows (n, D), metric (D, D), mean (D,).
    """
    spread = Spread()
    spread.add(rows, labels, mean)
    return spread.shrinkage(metric)


def labels_or_single(labels: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the labels; with a single input, each patch counts as an input of its own."""
    return labels if inputs > 1 else torch.arange(len(labels), device=labels.device)


def _squared_norms(
    rows: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, mean: torch.Tensor | None
) -> float:
    """Return the sum of |R' R|^2 over the inputs, R an input's rows without the mean."""
    order, ends = labels.argsort(), counts.cumsum(0)
    labels = labels[order]
    place = torch.arange(len(rows), device=rows.device) - (ends - counts)[labels]
    most, width = int(counts.max()), rows.shape[1]
    total, step = 0.0, max(1, _BLOCK // (most * width))
    for first in range(0, len(counts), step):
        last = min(first + step, len(counts))
        some = slice(int(ends[first] - counts[first]), int(ends[last - 1]))
        selected = rows[order[some]]
        block = rows.new_zeros(last - first, most, width)
        block[labels[some] - first, place[some]] = selected if mean is None else selected.sub_(mean)
        total += _squared_norm_of_products(block if most <= width else block.mT)
    return total


def _squared_norm_of_products(block: torch.Tensor) -> float:
    """Return the sum of |R R'|^2 over R in (number, n, D), computing each half of R R' once."""
    size = block.shape[1]
    total, step = 0.0, max(1, -(-size // 4))
    for first in range(0, size, step):
        products = block[:, first:] @ block[:, first : first + step].mT
        squares = products.square_().sum((0, 2)).double()
        total += float(squares[:step].sum() + 2 * squares[step:].sum())
    return total
