"""Carrying out a plan of any kind, channels removed first, and loading what was saved with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import decomposition
from decomposition import (
    CompressionPlan,
    FitOptions,
    LayerSpec,
    apply_plan,
    build_structure,
    compensate,
    inspect_layers,
    reestimate_batch_norm,
)
from decomposition.apply import FINAL, BatchNormCorrection
from decomposition.cost import example_batch
from decomposition.errors import PlanError
from decomposition.moments import calibration_batches
from pruning import KeptChannels, PruningError, kept_inputs, remove_channels

_Result = TypeVar("_Result")

_STATISTICS_BATCH = 256
# An axis of one example would not be told apart from one that is broadcast.
_EXAMPLES = 2


def carry_out(
    model: nn.Module,
    plan: CompressionPlan,
    calibration: torch.Tensor | Iterable[torch.Tensor] | None = None,
    *,
    sequential: bool = True,
    weigh_outputs: bool = True,
    batch_norm: BatchNormCorrection = "mean",
    options: FitOptions = FINAL,
    seed: int = 0,
) -> nn.Module:
    """Return a compressed copy of `model`: the plan's channels removed, then its layers decomposed.

    With calibration inputs, the layers that remain after a removal are solved for anew, so that they make up
    for the channels that are gone (`decomposition.compensate`), before anything is decomposed.

    Args:
        model: The dense model; left untouched.
        plan: What becomes of every layer.
        calibration: Model inputs, a few hundred to a few thousand, as one tensor or in batches.
        sequential: Make up for removed channels, and see `decomposition.apply_plan`. Without it a removal
            changes the inputs of batch norms by more than their mean: their statistics are then re-estimated
            on the calibration inputs, unless `batch_norm` is `keep`.
        weigh_outputs: See there.
        batch_norm: See there.
        options: See there.
        seed: See there.

    Raises:
        DecompositionError: If the plan does not fit the model or the calibration inputs are unusable.
    """
    images = calibration
    if images is not None and not isinstance(images, torch.Tensor):
        batches = calibration_batches(images)
        images = torch.cat(batches) if batches else torch.empty(0)
    if plan.kept_channels:
        if images is not None and sequential:
            model = _compensated(model, plan, images, correct_mean=batch_norm == "mean", seed=seed)
        model, plan = without_channels(model, plan)
        shifted = batch_norm == "reestimate" or (batch_norm == "mean" and not sequential)
        if images is not None and shifted:
            reestimate_batch_norm(model, images.split(_STATISTICS_BATCH))
    return apply_plan(
        model,
        plan,
        images,
        sequential=sequential,
        weigh_outputs=weigh_outputs,
        batch_norm=batch_norm,
        options=options,
        seed=seed,
    )


def _compensated(
    model: nn.Module, plan: CompressionPlan, images: torch.Tensor, *, correct_mean: bool, seed: int
) -> nn.Module:
    """Return a copy of the dense model that makes up for the channels that the plan removes."""
    present = _of_kept_channels(kept_inputs, model, plan)
    return compensate(model, present, images, correct_batch_norm=correct_mean, seed=seed)


def without_channels(model: nn.Module, plan: CompressionPlan) -> tuple[nn.Module, CompressionPlan]:
    """Return a copy of `model` without the channels that the plan removes, and what is left of the plan.

    Raises:
        PlanError: If the plan was made for another model or its kept channels do not fit this one.
    """
    pruned = _of_kept_channels(remove_channels, model, plan)
    return pruned, plan.after_removal(pruned)


def _of_kept_channels(
    function: Callable[[nn.Module, KeptChannels, torch.Tensor], _Result],
    model: nn.Module,
    plan: CompressionPlan,
) -> _Result:
    """Call a function of `pruning` with the plan's kept channels; what it refuses is an error of the plan."""
    plan.check_model(model)
    examples = example_batch(model, plan.input_shape, _EXAMPLES)
    try:
        return function(model, plan.kept_channels, examples)
    except PruningError as error:
        raise PlanError(f"the plan's kept channels do not fit the network: {error}") from error


def specs_after_removal(model: nn.Module, plan: CompressionPlan) -> list[LayerSpec]:
    """Return the layers of `model` as they are when the plan's channels are removed, in forward order.

    Raises:
        PlanError: If the plan was made for another model or its kept channels do not fit this one.
    """
    if plan.kept_channels:
        model, plan = without_channels(model, plan)
    return inspect_layers(model, plan.input_shape)


def save_compressed(network: nn.Module, plan: CompressionPlan, path: str | Path, *, dense: nn.Module) -> None:
    """Write a compressed network, with or without removed channels, once it is loaded back the same.

    Args:
        network: The compressed network, fine-tuned or not.
        plan: Its plan.
        path: File to write.
        dense: The network that the plan was made for; its weights are not used.

    Raises:
        PlanError: If `network` is not what the plan makes of `dense`.
    """
    decomposition.save_compressed(network, plan, path, dense=dense, structure=_structure)


def load_compressed(
    model: nn.Module, path: str | Path, plan: CompressionPlan | None = None
) -> tuple[nn.Module, CompressionPlan]:
    """Load what `decomposition.save_compressed` wrote, with or without removed channels.

    Args:
        model: The dense model's architecture; its weights are not used and it is left untouched.
        path: The file.
        plan: The plan, if it is to be another copy than the file's own.

    Returns:
        The compressed model and its plan.

    Raises:
        PlanError: If the file cannot be read, holds no plan, or does not fit the model.
    """
    return decomposition.load_compressed(model, path, plan, structure=_structure)


def _structure(model: nn.Module, plan: CompressionPlan) -> nn.Module:
    if plan.kept_channels:
        model, plan = without_channels(model, plan)
    return build_structure(model, plan)
