"""Rounding weights to integers so that other weights compensate for each rounding error.

Columns are rounded one by one, and the remaining columns compensate for each change of the outputs as well as
they can: with H = E[x x'] of the layer's inputs and U the upper triangular root of its inverse, H^-1 = U'U,
an error e in column j moves column k by -e U_jk / U_jj (GPTQ, Frantar et al., ICLR 2023, after the optimal
brain surgeon of Hassibi & Stork, NIPS 1992). Columns whose inputs are largest come first.
"""

from __future__ import annotations

import torch

from decomposition.calibration.metric import WIDEST, Metric, RowFactor, cholesky, whole
from decomposition.network.rounding import largest_integer, rounded_weight

# Share of the inputs' mean power that is added to each: GPTQ's own choice.
_DAMPING = 0.01
# Columns that are rounded before the columns behind them are moved, all at once.
_BLOCK = 128


def compensated_weight(weight: torch.Tensor, moments: Metric | None, bits: int) -> torch.Tensor:
    """Round a weight to signed integers, one scale for each row, with the least change of its outputs.

    The scale is the one that plain rounding takes, and a row's largest entry stays as it is: rounding the
    result once more (`decomposition.network.rounding`, or a runtime's quantiser) finds the same
    integers. Columns of zeros stay zero. No row changes its outputs more than plain rounding does.
    """
    weight = weight.double().cpu()  # where moments are; a GPU would wait at every column
    used = weight.abs().sum(0) > 0
    few_rows = isinstance(moments, RowFactor) and weight.shape[1] > WIDEST
    if moments is None or few_rows or not bool(used.any()):
        return rounded_weight(weight, bits)
    matrix = whole(moments).double()[..., used, :][..., used]
    rounded = torch.zeros_like(weight)
    rounded[:, used] = _compensated(weight[:, used], matrix, bits)
    plain = rounded_weight(weight, bits)
    changes = [(weight - version)[:, used] for version in (rounded, plain)]
    lost, lost_by_plain = ((_times(change, matrix) * change).sum(1) for change in changes)
    return torch.where((lost <= lost_by_plain)[:, None], rounded, plain)


def _compensated(weight: torch.Tensor, moments: torch.Tensor, bits: int) -> torch.Tensor:
    largest = largest_integer(bits)
    columns = weight.shape[1]
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    order = diagonal.reshape(-1, columns).mean(0).argsort(descending=True)
    weight, moments = weight[:, order], moments[..., order, :][..., order]
    scale = weight.abs().amax(1) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    fixed = weight.abs() == weight.abs().amax(1, keepdim=True)
    damping = (_DAMPING * diagonal.mean(-1)).clamp_min(1e-30)
    identity = torch.eye(columns, dtype=moments.dtype)
    damped = moments + damping[..., None, None] * identity
    # U is the inverse of the upper triangular R with R R' = H, a lower one from the last column to the first.
    root = cholesky(damped.flip(-2, -1)).flip(-2, -1)
    upper = torch.linalg.solve_triangular(root, identity, upper=True)
    moved, rounded = weight.clone(), torch.empty_like(weight)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty_like(weight[:, start:stop])
        for column in range(start, stop):
            now = moved[:, column]
            integers = torch.round(now / scale).clamp(-largest, largest)
            rounded[:, column] = torch.where(fixed[:, column], weight[:, column], integers * scale)
            error = (now - rounded[:, column]) / upper[..., column, column]
            moved[:, column + 1 : stop] -= error[:, None] * upper[..., column, column + 1 : stop]
            errors[:, column - start] = error
        if stop < columns:
            moved[:, stop:] -= _times(errors, upper[..., start:stop, stop:])
    return rounded[:, order.argsort()]


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return each row times the matrix, or times its own matrix if there are several."""
    return rows @ matrix if matrix.ndim == 2 else (rows[:, None] @ matrix)[:, 0]
