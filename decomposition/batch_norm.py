"""Correcting batch normalisation for what compression did to its inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from decomposition.cost import evaluation_mode
from decomposition.errors import DecompositionError

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def tracked_batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of `model` that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]


def reestimate_batch_norm(model: nn.Module, calibration: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Replace the running statistics of every batch norm by those on the calibration set, in place.

    Args:
        model: The compressed model; everything but the statistics stays as it was.
        calibration: Batches of model inputs, or one tensor of them.

    Raises:
        DecompositionError: If there are no batches.
    """
    batches = [calibration] if isinstance(calibration, torch.Tensor) else list(calibration)
    if not batches or batches[0].shape[0] == 0:
        raise DecompositionError("batch norm cannot be re-estimated without calibration inputs; pass some")
    norms = tracked_batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    with evaluation_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average over the batches
            norm.training = True
        for batch in batches:
            model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
