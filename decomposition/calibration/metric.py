"""Compute with the metric of fits (input moments, output sensitivities), and select input channels in it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowFactor:
    """The matrix F'F + r I of D columns, F = `rows` (n, D), r = `ridge`; cheaper than whole if n < D."""

    rows: torch.Tensor
    ridge: float = 0.0


WIDEST = 8192
"""Columns of the largest matrix of second moments that is made, in float64 half a GiB, of which a fit holds
several. Wider layers are known by rows of so many numbers together, and no sensitivity matrix is larger."""

# From here on computing half of a product of rows pays for its smaller pieces.
_COLUMNS_TO_HALVE = 256
# Numbers of patches that are copied at a time, in float64 or without their mean.
_COPIED = 2**24
# Shares of a matrix's mean power to add to its diagonal, tried in turn until it has a Cholesky factor: the
# first ones cure rounding errors; the last equals the damping of compensated rounding.
_JITTERS = (0.0, 1e-12, 1e-9, 1e-6, 1e-4, 1e-2)

Metric = torch.Tensor | RowFactor
"""E[x x'], shape (D, D), float64."""


def most_rows(columns: int, wanted: int) -> int:
    """Limit the rows of a layer so that they hold at most `WIDEST`^2 numbers if it is wider than that."""
    return wanted if columns <= WIDEST else max(1, min(wanted, WIDEST**2 // columns))


def worth_factoring(count: int, columns: int) -> bool:
    """Tell whether `count` rows take less memory and time than the matrix (columns, columns)."""
    return 2 * count < columns or columns > WIDEST


def gram(rows: torch.Tensor) -> torch.Tensor:
    """Return rows' rows for rows (n, D), shape (D, D), computing each half of it once (BLAS's `syrk`)."""
    count = rows.shape[1]
    if count < _COLUMNS_TO_HALVE:
        return rows.T @ rows
    products, step = rows.new_empty(count, count), -(-count // 4)
    for first in range(0, count, step):
        here, behind = slice(first, first + step), slice(first + step, None)
        products[first:, here] = rows[:, first:].T @ rows[:, here]
        products[here, behind] = products[behind, here].T
    return products


def mean_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of rows (n, D), float64, on the CPU."""
    return torch.stack([part.double().sum(0) for part in in_parts(rows)]).sum(0).cpu() / len(rows)


def covariance(
    rows: torch.Tensor,
    mean: torch.Tensor,
    others: torch.Tensor | None = None,
    others_mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return E[(r - mean) (o - others_mean)'], float64 on the CPU; r in rows (n, D), o in others or rows."""
    # Means are subtracted before products in float32: a thousandth of the mean would be lost in them.
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    if others is None or others_mean is None:
        for part in in_parts(rows):
            total = total + gram(part - mean.to(part)).double()
    else:
        for part, other in zip(in_parts(rows), in_parts(others, like=rows), strict=True):
            total = total + ((part - mean.to(part)).T @ (other - others_mean.to(other))).double()
    return total.cpu() / len(rows)


def in_parts(rows: torch.Tensor, *, like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Split rows (n, ...) so that the parts, or as many rows of `like`, hold `_COPIED` numbers at most."""
    return rows.split(max(1, _COPIED // max(1, (rows if like is None else like)[:1].numel())))


def cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower Cholesky factor of a matrix or batch of them, which rounding may make indefinite."""
    power = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    for share in _JITTERS:
        raised = matrix + share * power * torch.eye(matrix.shape[-1]).to(matrix) if share else matrix
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not bool(failed.any()):
            if share:
                log.warning(
                    "second moments of %d features were not positive; %g of their mean power was added to "
                    "each. Give features of similar size that are not far from zero",
                    matrix.shape[-1],
                    share,
                )
            return factor
    raise DecompositionError(
        f"second moments of {matrix.shape[-1]} features are not positive, nor with {_JITTERS[-1]:g} of their "
        "mean power added to each; check that weights and calibration inputs are finite, and normalise them"
    )


def columns(metric: Metric) -> int:
    return metric.rows.shape[1] if isinstance(metric, RowFactor) else metric.shape[1]


def times(rows: torch.Tensor, metric: Metric) -> torch.Tensor:
    """Return rows @ metric for rows (m, D)."""
    if isinstance(metric, RowFactor):
        product = (rows @ metric.rows.T) @ metric.rows
        return product + metric.ridge * rows if metric.ridge else product
    return rows @ metric


def powers(rows: torch.Tensor, metric: Metric | None) -> torch.Tensor:
    """Return row' metric row for rows (m, D), shape (m,); the squared norms without a metric."""
    if isinstance(metric, torch.Tensor):
        return ((rows @ metric) * rows).sum(1)
    norms = torch.linalg.vector_norm(rows, dim=1).square()  # without a copy of the rows
    if metric is None:
        return norms
    return (rows @ metric.rows.T).square().sum(1) + metric.ridge * norms


def products(rows: torch.Tensor, metric: Metric | None) -> torch.Tensor:
    """Return rows metric rows' for rows (m, D), shape (m, m); the Gram matrix without a metric."""
    if isinstance(metric, torch.Tensor):
        return (rows @ metric) @ rows.T
    if metric is None:
        return rows @ rows.T
    seen = rows @ metric.rows.T
    gram = seen @ seen.T
    return gram + metric.ridge * (rows @ rows.T) if metric.ridge else gram


def whole(metric: Metric) -> torch.Tensor:
    if isinstance(metric, RowFactor):
        matrix = metric.rows.T @ metric.rows
        matrix.diagonal().add_(metric.ridge)
        return matrix
    return metric


def converted(metric: Metric, dtype: torch.dtype) -> Metric:
    if isinstance(metric, RowFactor):
        return RowFactor(metric.rows.to(dtype), metric.ridge)
    return metric.to(dtype)


def scaled(metric: Metric, factor: torch.Tensor | float) -> Metric:
    """Return factor * metric, in float64."""
    if isinstance(metric, RowFactor):
        return RowFactor(metric.rows.double() * factor**0.5, metric.ridge * float(factor))
    return metric.double() * factor


def trace(metric: Metric) -> float:
    if isinstance(metric, RowFactor):
        return float(metric.rows.norm().square()) + metric.ridge * metric.rows.shape[1]
    return float(metric.diagonal().sum())


def squared_norm(metric: Metric) -> float:
    if isinstance(metric, RowFactor):
        products = metric.rows @ metric.rows.T
        cross = 2 * metric.ridge * float(products.diagonal().sum())
        return float(products.square().sum()) + cross + metric.ridge**2 * metric.rows.shape[1]
    return float(metric.square().sum())


def shrunk(metric: Metric, share: float) -> Metric:
    """Mix the metric with the identity of the same trace."""
    return shrunk_rows(metric, share) if isinstance(metric, RowFactor) else shrunk_matrix(metric, share)


def shrunk_rows(metric: RowFactor, share: float) -> RowFactor:
    if share == 0:
        return metric
    ridge = share * trace(metric) / columns(metric)
    return RowFactor(metric.rows * (1 - share) ** 0.5, metric.ridge * (1 - share) + ridge)


def shrunk_matrix(metric: torch.Tensor, share: float) -> torch.Tensor:
    mixed = metric * (1 - share)
    mixed.diagonal().add_(share * trace(metric) / columns(metric))
    return mixed


def with_mean(metric: Metric, mean: torch.Tensor) -> Metric:
    """Return metric + mean mean', which turns moments around the mean into those around zero."""
    if isinstance(metric, RowFactor):
        return RowFactor(torch.cat([metric.rows, mean[None]]), metric.ridge)
    return metric + torch.outer(mean, mean)


def is_finite(metric: Metric) -> bool:
    """Tell whether no entry is NaN or infinite, without a copy of them."""
    if isinstance(metric, RowFactor):
        return is_finite(metric.rows) and math.isfinite(metric.ridge)
    return not metric.numel() or bool(torch.isfinite(torch.stack(metric.aminmax())).all())


def channel_products(patches: torch.Tensor) -> torch.Tensor:
    """Return the products of channels (channels, channels) of patches (n, channels, kernel)."""
    total = patches.new_zeros(())
    for part in in_parts(patches):
        total = total + torch.einsum("nik,njk->ij", part, part)
    return total


def channel_moments(metric: Metric, channels: int, kernel: int) -> torch.Tensor:
    """Average the second moments of the channels (channels, channels) over the kernel's positions."""
    if isinstance(metric, RowFactor):
        moments = channel_products(metric.rows.reshape(-1, channels, kernel)) / kernel
        moments.diagonal().add_(metric.ridge)
        return moments
    return torch.einsum("ikjk->ij", metric.reshape(channels, kernel, channels, kernel)) / kernel


# Numbers that are copied into padded blocks at a time: bounds the memory.
_BLOCK = 2**24


class Spread:
    """Variance of second moments between inputs, which determines how far they are shrunk."""

    def __init__(self) -> None:
        self._rows = 0
        self._squared_rows = 0.0
        self._squares = 0.0

    def add(self, rows: torch.Tensor, labels: torch.Tensor, mean: torch.Tensor | None = None) -> None:
        """Add patches `rows` (n, D); `labels` (n,) tell the input of each, and `mean` (D,) is subtracted."""
        counts = labels.cpu().bincount().to(labels.device)
        self._rows += len(rows)
        self._squared_rows += float(counts.double().square().sum())
        self._squares += _squared_norms(rows, labels, counts, mean)

    def shrinkage(self, metric: Metric, scale: float | None = None) -> float:
        """Return the weight of the identity, from 0 to 1 (b^2 / d^2 of Ledoit & Wolf 2004)."""
        scale = 1 / self._rows if scale is None else scale
        size = squared_norm(metric)
        distance = size - trace(metric) ** 2 / columns(metric)
        variance = self._squares * scale**2 - size * self._squared_rows / self._rows**2
        if not distance > 0:  # the metric is a multiple of the identity already
            return 0.0
        return min(max(variance / distance, 0.0), 1.0)


def shrinkage(
    rows: torch.Tensor, labels: torch.Tensor, metric: Metric, mean: torch.Tensor | None = None
) -> float:
    """Return the weight of the identity, 0 to 1, in the shrunk E[x x'] (`metric`) of patches (n, D)."""
    spread = Spread()
    spread.add(rows, labels, mean)
    return spread.shrinkage(metric)


def labels_or_single(labels: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the labels; of a single input, count each patch as one: a spread needs two."""
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


# Share of its mean power that every output direction keeps at least.
_FLOOR = 0.01


def floored(sensitivity: torch.Tensor) -> torch.Tensor:
    """Raise the small eigenvalues of a sensitivity (out, out), which makes it positive definite."""
    matrix = (sensitivity.double() + sensitivity.double().T) / 2
    raised = matrix.clone()
    # The clamp makes a sensitivity of zeros positive, too.
    raised.diagonal().add_((_FLOOR * matrix.diagonal().mean()).clamp_min(1e-300))
    if torch.linalg.cholesky_ex(raised).info.item():
        root = symmetric_root(sensitivity)
        return root @ root
    return raised


def symmetric_root(sensitivity: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a sensitivity (out, out), its small eigenvalues raised."""
    matrix = (sensitivity.double() + sensitivity.double().T) / 2
    values, vectors = torch.linalg.eigh(matrix)
    floor = _FLOOR * values.clamp_min(0).mean().clamp_min(1e-300)
    return (vectors * (values.clamp_min(0) + floor).sqrt()) @ vectors.T


def triangular_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular R with R' R = `matrix`, at a tenth of the cost of `symmetric_root`."""
    return cholesky(matrix).T


# Ridge, as a share of the inputs' mean power: keeps the moments of dependent channels invertible.
_RIDGE = 1e-3
# Of the remaining channels one in so many is removed before each new solution for the weight.
_AT_A_TIME = 32


@dataclass(frozen=True)
class Selection:
    """Input channels that a layer reads, its weight on them, and the relative output error."""

    reads: tuple[int, ...]
    weight: torch.Tensor
    error: float


@dataclass(frozen=True)
class Narrowing:
    """Numbers of input channels that a layer may read; `producer` is the layer that loses the others."""

    producer: str
    counts: tuple[int, ...]


def select_inputs(
    weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None, counts: Iterable[int]
) -> dict[int, Selection]:
    """Select the input channels that a layer reads best, for several numbers of them, one in the other."""
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
    # Blocks of removed channels are zero; an identity makes them solvable.
    own = own + (own.diagonal(dim1=1, dim2=2).sum(1) == 0)[:, None, None] * torch.eye(kernel)
    parts = weight.reshape(-1, channels, kernel).transpose(0, 1)
    weighted = (g @ weight).reshape(-1, channels, kernel).transpose(0, 1)
    products: torch.Tensor = weighted.transpose(1, 2) @ parts
    return torch.linalg.solve(own, products).diagonal(dim1=1, dim2=2).sum(1)
