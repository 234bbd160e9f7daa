"""The dense network: built, loaded or trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankrl.data import ImageData
from rankrl.models import build_model, load_checkpoint
from rankrl.progress import progress_bar
from rankrl.training import EpochRow, TrainingProgress, TrainingRecipe, TrainingResult, train

log = logging.getLogger(__name__)


def build_network(model: Mapping[str, Any], data: ImageData, *, seed: int) -> nn.Module:
    """Build the network that a configuration describes and load its checkpoint, if it names one.

    Args:
        model: `architecture`, `checkpoint` and the architecture's own options.
        data: The dataset, for the input shape and the number of classes.
        seed: Seed of the initial weights.

    Returns:
        The network in evaluation mode, float32, on the CPU.
    """
    options = {key: value for key, value in model.items() if key not in ("architecture", "checkpoint")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_model(model["architecture"], data.input_shape, data.classes, options)
    if model.get("checkpoint"):
        load_checkpoint(network, model["checkpoint"])
    return network.eval()


def run_training(
    description: str,
    network: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    *,
    state_file: Path,
    teacher: nn.Module | None = None,
    on_epoch: Callable[[EpochRow], None] | None = None,
) -> TrainingResult:
    """Train a network in place with a progress bar, going on from `state_file` where it exists.

    The network is returned to the CPU; `on_epoch` is called with the row of every new epoch.
    """
    steps = recipe.epochs * max(1, len(data.train) // min(recipe.batch_size, len(data.train)))
    with progress_bar(description, total=steps) as bar:

        def show(progress: TrainingProgress) -> None:
            bar.update(progress.step, best=progress.best_accuracy)
            if progress.row is not None and on_epoch is not None:
                on_epoch(progress.row)

        result = train(
            network,
            data,
            recipe,
            teacher=teacher,
            state_file=state_file,
            resume=state_file.exists(),
            on_step=show,
        )
    network.cpu()
    if teacher is not None:
        teacher.cpu()
    log.info("%s: held-out accuracy %.4f after epoch %d", description, result.accuracy, result.epoch)
    return result
