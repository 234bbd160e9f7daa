"""Correcting batch normalisation for what compression did to its inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.calibration.input_check import checked_batches
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import run_model
from decomposition.network.kinds import BatchNorm
from decomposition.public_calls import public_call


def tracked_batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of `model` that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]


@public_call()
def reestimate_batch_norm(model: nn.Module, calibration: CalibrationInputs) -> None:
    """Replace the running statistics of every batch norm by those on the calibration set, in place.

    Args:
        model: The compressed model; everything but the statistics stays as it was.
        calibration: Batches of model inputs, or one batch (`decomposition.network`); labels are left away.

    Raises:
        DecompositionError: If there are no inputs, or the model does not take them.
    """
    batches = checked_batches(calibration, model)
    norms = tracked_batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    with evaluation_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.training = True
        handles = [norm.register_forward_pre_hook(_weighing(norm)) for norm in norms]
        try:
            for batch in batches:
                run_model(model, batch)
        finally:
            for handle in handles:
                handle.remove()
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def _weighing(norm: BatchNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook that makes a batch norm's statistics the average over all of its inputs."""
    seen = 0

    def weigh(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        count = len(inputs[0])
        seen += count
        norm.momentum = count / seen

    return weigh
