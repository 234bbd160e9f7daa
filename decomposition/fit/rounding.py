"""Round weights and stages to integers; later weights compensate for the errors of earlier ones (GPTQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    channel_moments,
    cholesky,
    converted,
    powers,
    times,
)
from decomposition.calibration.metric import columns as metric_columns
from decomposition.fit.refit import RefitProblem
from decomposition.formats import Cores, TensorFormat
from decomposition.formats.layers import FactorisedLayer, StagedLayer
from decomposition.network.geometry import WeightModes
from decomposition.network.rounding import largest_integer, rounded_weight

# Share of the inputs' mean power that is added to the diagonal: GPTQ's own choice.
_DAMPING = 0.01
# Columns that are rounded before the remaining ones are updated in one product.
_BLOCK = 128


def compensated_weight(weight: torch.Tensor, moments: Metric | None, bits: int) -> torch.Tensor:
    """Round a weight to signed integers, one scale a row, with the least change of its outputs.

    A row's largest entry stays, so that rounding again finds the same integers; columns of zeros stay zero,
    and no row changes its outputs more than plain rounding does.
    """
    weight = weight.double().cpu()  # where the moments are; a GPU would synchronise at every column
    used = weight.abs().sum(0) > 0
    if moments is None or not bool(used.any()):
        return rounded_weight(weight, bits)
    metric = converted(moments, torch.double)
    if not bool(used.all()):
        metric = _of_columns(metric, used)
    rounded = torch.zeros_like(weight)
    rounded[:, used] = _compensated(weight[:, used], metric, bits)
    plain = rounded_weight(weight, bits)
    changes = [(weight - version)[:, used] for version in (rounded, plain)]
    lost, lost_by_plain = (_powers(change, metric) for change in changes)
    return torch.where((lost <= lost_by_plain)[:, None], rounded, plain)


def _of_columns(metric: Metric, chosen: torch.Tensor) -> Metric:
    """Select and order columns of a metric, or of several."""
    if isinstance(metric, RowFactor):
        return RowFactor(metric.rows[:, chosen], metric.ridge)
    return metric[..., chosen, :][..., chosen]


def _compensated(weight: torch.Tensor, metric: Metric, bits: int) -> torch.Tensor:
    largest = largest_integer(bits)
    columns = weight.shape[1]
    diagonal = _diagonal(metric)
    # Columns with the most power come first: all later ones can compensate for their errors.
    order = diagonal.reshape(-1, columns).mean(0).argsort(descending=True)
    weight = weight[:, order]
    scale = weight.abs().amax(1) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    fixed = weight.abs() == weight.abs().amax(1, keepdim=True)
    # The clamp keeps H invertible if all inputs are zero.
    damping = (_DAMPING * diagonal.mean(-1)).clamp_min(1e-30)
    if isinstance(metric, RowFactor):
        blocks = _blocks_of_rows(metric, order, float(damping))
    else:
        blocks = _blocks_of_matrix(metric, order, damping)
    moved, rounded = weight.clone(), torch.empty_like(weight)
    for start, (upper, passed_on) in zip(range(0, columns, _BLOCK), blocks, strict=True):
        stop = start + upper.shape[-1]
        errors = torch.empty_like(weight[:, start:stop])
        for index, column in enumerate(range(start, stop)):
            now = moved[:, column]
            integers = torch.round(now / scale).clamp(-largest, largest)
            rounded[:, column] = torch.where(fixed[:, column], weight[:, column], integers * scale)
            error = (now - rounded[:, column]) / upper[..., index, index]
            moved[:, column + 1 : stop] -= error[:, None] * upper[..., index, index + 1 :]
            errors[:, index] = error
        if stop < columns:
            moved[:, stop:] -= passed_on(errors)
    return rounded[:, order.argsort()]


_Blocks = Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]
"""Of every block of columns the rows of U, upper triangular with U'U = H^-1, in the block itself, and what
they make of errors in the columns behind it."""


def _blocks_of_matrix(metric: torch.Tensor, order: torch.Tensor, damping: torch.Tensor) -> _Blocks:
    # U is the inverse of the upper triangular R with R R' = H, a lower one from the last column to the first.
    backwards = order.flip(0)
    damped = metric[..., backwards, :][..., backwards]  # of many columns, few copies fit into memory
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[..., None])
    root = cholesky(damped).flip(-2, -1)
    del damped
    upper = torch.linalg.solve_triangular(root, torch.eye(len(order), dtype=root.dtype), upper=True)
    del root
    for start in range(0, len(order), _BLOCK):
        here, behind = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        yield upper[..., here, here], partial(_times, matrix=upper[..., here, behind])


def _blocks_of_rows(metric: RowFactor, order: torch.Tensor, damping: float) -> _Blocks:
    """Compute U from H = F'F + d I of the columns that are left: (I - F'K^-1 F) / d with K = F F' + d I."""
    rows, ridge = metric.rows[:, order], metric.ridge + damping
    gram = rows @ rows.T
    gram.diagonal().add_(ridge)
    inverse = torch.cholesky_inverse(cholesky(gram))
    del gram
    for start in range(0, len(order), _BLOCK):
        here, rest = rows[:, start : start + _BLOCK], rows[:, start + _BLOCK :]
        solved = inverse @ here
        left = -(here.T @ solved)
        left.diagonal().add_(1)
        root = cholesky(left)
        taken = torch.linalg.solve_triangular(root, solved.T, upper=False)
        yield root.T * ridge**-0.5, partial(_through_rows, taken=taken, rows=rest, scale=-(ridge**-0.5))
        inverse += taken.T @ taken


def _through_rows(
    errors: torch.Tensor, taken: torch.Tensor, rows: torch.Tensor, scale: float
) -> torch.Tensor:
    return errors @ taken @ rows * scale


def _diagonal(metric: Metric) -> torch.Tensor:
    if isinstance(metric, RowFactor):
        return metric.rows.square().sum(0) + metric.ridge
    return metric.diagonal(dim1=-2, dim2=-1)


def _powers(rows: torch.Tensor, metric: Metric) -> torch.Tensor:
    """Return each row's power, by its own matrix if there are several."""
    if isinstance(metric, RowFactor):
        return powers(rows, metric)
    return (_times(rows, metric) * rows).sum(1)


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return each row times the matrix, or times its own matrix if there are several."""
    return rows @ matrix if matrix.ndim == 2 else (rows[:, None] @ matrix)[:, 0]


# Share of the features' mean power, for a stable solution of the output stage.
_RIDGE = 1e-6
# Share of the largest power; unused channels would otherwise be scaled up without bound.
_SMALLEST_POWER = 1e-6


def equalise(layer: StagedLayer, metric: Metric | None) -> None:
    """Give all channels between two stages the same power (equalisation, Nagel et al., ICCV 2019)."""
    if layer.kernel is not None and layer.kernel.in_channels != len(layer.reduce.weight):  # type: ignore[arg-type]
        return  # a bond travels in the batch axis: the kernel applies to fewer channels than there are
    cores = [core.detach().double().cpu() for core in layer.cores()]
    output, features = layer.tensor_format.halves(cores, layer.modes)
    weights: list[torch.Tensor] = [stage.weight for stage in layer.stages()]  # type: ignore[misc]
    last = weights[-1].detach().flatten(1).double().cpu()
    if output.shape != last.shape or not torch.allclose(output, last):
        return  # the channels between the stages are in another order than the features
    sizes = [powers(features, metric)]
    if len(weights) == 3:
        modes, first = layer.modes, weights[0].detach().flatten(1).double().cpu()
        moments = None if metric is None else channel_moments(metric, modes.in_channels, modes.kernel)
        sizes.insert(0, powers(first, moments))
    for power, (before, after) in zip(sizes, pairwise(weights), strict=True):
        size = power.clamp_min(_SMALLEST_POWER * power.max().clamp_min(1e-300)).sqrt().to(before)
        depthwise = after.shape[1] == 1 and len(after) == len(size)
        with torch.no_grad():
            before /= size.reshape(-1, *[1] * (before.ndim - 1))
            after *= size.reshape(*[] if depthwise else [1], -1, *[1] * (after.ndim - 1 - (not depthwise)))


def amplification(
    tensor_format: TensorFormat, cores: Cores, modes: WeightModes, metric: Metric | None
) -> float:
    """Return sqrt(sum_r |A_r|^2 E[(Q_r x)^2] / E|A Q x|^2), large where terms of A Q cancel one another."""
    output, features = tensor_format.halves(cores, modes)
    whole = float(powers(output @ features, metric).sum())
    terms = float((output.square().sum(0) * powers(features, metric)).sum())
    return (terms / whole) ** 0.5 if whole > 0 else 1.0


def round_features(layer: FactorisedLayer, metric: Metric | None, bits: int) -> None:
    """Round the stages before the last one, each fitted to its inputs from the rounded stages before it."""
    if not isinstance(layer, StagedLayer) or metric is None or isinstance(layer.reduce, nn.ParameterList):
        return
    modes = layer.modes
    first = _latent(layer.reduce)
    if first.flatten(1).shape[1] != (modes.in_channels if modes.kernel > 1 else metric_columns(metric)):
        return
    inputs: Metric = metric if modes.kernel == 1 else channel_moments(metric, modes.in_channels, modes.kernel)
    _set_latent(layer.reduce, compensated_weight(first.flatten(1), inputs, bits))
    if layer.kernel is None or isinstance(metric, RowFactor) or layer.kernel.in_channels != len(first):
        return
    middle = _latent(layer.kernel)
    if middle[0, 0].numel() != modes.kernel or middle.shape[1] not in (1, len(first)):
        return
    mixing = rounded_weight(_latent(layer.reduce).flatten(1).double().cpu(), bits)
    blocks = metric.reshape(modes.in_channels, modes.kernel, modes.in_channels, modes.kernel)
    if middle.shape[1] == 1:
        groups = torch.einsum("ri,ikjl->rkjl", mixing, blocks)
        own = torch.einsum("rj,rkjl->rkl", mixing, groups)
        repeats = len(middle) // len(first)
        arriving = own.repeat_interleave(repeats, 0)
    else:
        half = torch.einsum("ri,ikjl->rkjl", mixing, blocks)
        arriving = torch.einsum("rkjl,sj->rksl", half, mixing).reshape(middle[0].numel(), -1)
    _set_latent(layer.kernel, compensated_weight(middle.flatten(1), arriving, bits))


def _latent(stage: nn.Module) -> torch.Tensor:
    """Return the unrounded weight of a rounded stage."""
    return stage.parametrizations["weight"].original.detach()  # type: ignore[index, union-attr]


def _set_latent(stage: nn.Module, weight: torch.Tensor) -> None:
    """Set the unrounded weight of a rounded stage, in any shape of as many elements."""
    latent: torch.Tensor = stage.parametrizations["weight"].original  # type: ignore[index, union-attr]
    with torch.no_grad():
        latent.copy_(weight.reshape(latent.shape))


def make_up(layer: FactorisedLayer, problem: RefitProblem, bits: int) -> None:
    """Round the output stage, solved for again for rounded features Q: A = W S Q' (Q S Q')^-1."""
    cores = [core.detach().double().cpu() for core in layer.cores()]
    if layer.output_stage(cores) is None:
        return
    output, features = layer.tensor_format.halves(cores, layer.modes)
    target = problem.target.flatten(1)
    weighed = features if problem.metric is None else times(features, problem.metric)
    gram = weighed @ features.T
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-30)
    # The ridge pulls towards the present output stage: directions without inputs keep their weights.
    right = (target - output @ features) @ weighed.T
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), right.T).T
    rounded = compensated_weight(output + change, gram, bits)
    stage = layer.output_stage(layer.tensor_format.set_output(cores, layer.modes, rounded))
    if stage is not None:
        _set_latent(*stage)
