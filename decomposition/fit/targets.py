"""What a layer has to reproduce on the inputs that arrive: a target weight and the metric to fit it in."""

from __future__ import annotations

import torch

from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    cholesky,
    covariance,
    shrunk_matrix,
    shrunk_rows,
    trace,
)
from decomposition.calibration.shrinkage import shrinkage

# Refits shrink towards the original weight by this fraction of the inputs' mean power at least.
RIDGE = 1e-3


def from_many_patches(
    weight: torch.Tensor,
    dense: torch.Tensor,
    arriving: torch.Tensor,
    dense_mean: torch.Tensor,
    mean: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    centred: bool,
) -> tuple[torch.Tensor, Metric]:
    """Return the target (W C_xy + r W) (C_yy + r I)^-1 and the metric C_yy, `centred` or not.

    With the labels of the inputs that patches are from, both are shrunk.
    """
    moments = covariance(arriving, mean)
    # W C_xy by way of the outputs W x: they are far fewer than the inputs.
    outputs_mean = weight @ dense_mean
    cross = covariance(arriving, mean, dense @ weight.T.to(dense), outputs_mean).T
    share = 0.0 if labels is None else shrinkage(arriving, labels, moments, mean.to(arriving))
    return target_and_metric(weight, moments, cross, outputs_mean, mean, share, centred=centred)


def target_and_metric(
    weight: torch.Tensor,
    covariance: torch.Tensor,
    cross: torch.Tensor,
    outputs_mean: torch.Tensor,
    mean: torch.Tensor,
    share: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, Metric]:
    """Return the target (W C_xy + r W) (C_yy + r I)^-1 and the metric C_yy, `centred` or not.

    Shapes: covariance (D, D), cross (out, D), mean (D,).
    """
    metric = shrunk_matrix(covariance, share)
    cross = (1 - share) * cross + share * covariance.diagonal().mean() * weight
    if not centred:
        metric = metric + torch.outer(mean, mean)
        cross = cross + torch.outer(outputs_mean, mean)
    ridge = RIDGE * metric.diagonal().mean().clamp_min(1e-30)
    regularised = metric.clone()
    regularised.diagonal().add_(ridge)
    return torch.cholesky_solve((cross + ridge * weight).T, cholesky(regularised)).T, metric


def target_and_row_metric(
    weight: torch.Tensor,
    outputs: torch.Tensor,
    arriving: torch.Tensor,
    outputs_mean: torch.Tensor,
    mean: torch.Tensor,
    share: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, RowFactor]:
    """Return what `target_and_metric` does, of patches that are fewer than the numbers in one.

    With X and Y the patches it is W + (W X' - W Y') (Y Y' + r I)^-1 Y, and nothing is as large as C_yy.
    """
    scale = len(arriving) ** -0.5
    metric = shrunk_rows(RowFactor((arriving.double().cpu() - mean) * scale), share)
    rows = metric.rows
    expected = (1 - share) ** 0.5 * scale * (outputs.double().cpu() - outputs_mean)
    if not centred:
        rows, expected = torch.cat([rows, mean[None]]), torch.cat([expected, outputs_mean[None]])
        metric = RowFactor(rows, metric.ridge)
    ridge = metric.ridge + max(RIDGE * trace(metric) / rows.shape[1], 1e-30)
    regularised = rows @ rows.T
    regularised.diagonal().add_(ridge)
    change = torch.cholesky_solve(expected - rows @ weight.T, cholesky(regularised))
    return weight + change.T @ rows, metric


def from_few_patches(
    weight: torch.Tensor,
    dense: torch.Tensor,
    arriving: torch.Tensor,
    dense_mean: torch.Tensor,
    mean: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    centred: bool,
) -> tuple[torch.Tensor, Metric]:
    """Return the same where patches are fewer than the numbers in one."""
    share = 0.0
    if labels is not None:
        rows = arriving.double().cpu() - mean
        share = shrinkage(rows, labels.cpu(), RowFactor(rows * len(rows) ** -0.5))
    outputs = dense.double().cpu() @ weight.T
    return target_and_row_metric(weight, outputs, arriving, weight @ dense_mean, mean, share, centred=centred)
