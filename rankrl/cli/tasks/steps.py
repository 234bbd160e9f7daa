"""Train, search and fine-tune as the configuration says: the steps that several tasks share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import FitLibrary
from decomposition.cache import Cache
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.data.calibration import CALIBRATION_BATCH, calibration_images
from rankrl.device import accepted_layout, in_layout
from rankrl.errors import RunStoppedError, counted
from rankrl.models import checkpoint_heldout, save_checkpoint
from rankrl.networks.image_module import ImageModule
from rankrl.networks.module import ModuleNetwork
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.scores.evaluator import EvaluatorOptions
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.request import opened_session
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import EpochRow, TrainingRecipe, TrainingResult
from rankrl.training.networks import (
    build_network,
    guessing_warning,
    heldout_accuracy,
    model_title,
    run_training,
)
from rankrl.training.teachers import Teacher, read_teacher
from rankrl.verify.measure import with_preprocessing

log = logging.getLogger(__name__)


def dense_network(config: AppConfig, data: ImageData, folder: RunFolder) -> nn.Module:
    """Load the dense network from its checkpoint, or train it; warn if it is no better than guessing."""
    network = build_network(config.model, data, seed=config.seed)
    if not config.model.get("checkpoint"):
        dense_training(config, data, network, folder)
        return network
    warning = guessing_warning(network, data)
    if warning is not None:
        folder.warn(
            f"{warning}. Check that model.checkpoint={config.model['checkpoint']} was trained on this "
            "dataset, with its classes in this order and with its normalisation."
        )
    return network


def teacher(config: AppConfig, data: ImageData) -> Teacher | None:
    """Return the teacher that finetune.teacher names, its accuracy on held-out images logged; else None."""
    options = config.finetune
    if not options.teachers or options.epochs == 0 or options.distillation == 0:
        return None
    read = read_teacher(options, config.model, data, seed=config.seed)
    log.info("fine-tune: the teacher, %s: held-out accuracy %.4f", read.title, read.accuracy)
    return read


def check_budget(config: AppConfig, data: ImageData) -> None:
    """Refuse a budget that the network cannot reach, before it is trained."""
    if config.model.get("checkpoint"):  # no training to save; the search checks before it fits
        return
    network = build_network(config.model, data, seed=config.seed)
    check_reachable(
        ModuleNetwork(network, data.input_shape),
        options.candidate_options(config),
        options.search_goal(config),
    )


def heldout_is_new(config: AppConfig, data: ImageData) -> bool:
    """Tell whether the dense network is known to be trained without the held-out images."""
    checkpoint = config.model.get("checkpoint")
    return not checkpoint or checkpoint_heldout(checkpoint) == data.heldout.digest()


def dense_training(
    config: AppConfig, data: ImageData, network: nn.Module, folder: RunFolder
) -> TrainingResult:
    """Train the dense network in place and save it; warn if it is no better than guessing."""
    recipe = options.training_recipe(config, network)
    result = _trained("train", network, data, recipe, folder, stage="train")
    new = heldout_is_new(config, data)  # false for initial weights that may have seen the held-out images
    save_checkpoint(
        network,
        folder.dense,
        heldout=data.heldout.digest() if new else None,
        preprocessing=data.preprocessing.to_dict(),
    )
    warning = guessing_warning(network, data)
    if warning is not None:
        folder.warn(
            f"{warning}. It was trained for {counted(recipe.epochs, 'epoch')} (train.epochs) at the learning "
            f"rate {result.lr:.3g} (train.optim.lr). Train it longer or at another rate, or give trained "
            "weights with model.checkpoint=PATH."
        )
    return result


def searched_network(config: AppConfig, data: ImageData, dense: nn.Module, folder: RunFolder) -> ImageModule:
    """Return the dense network as searches and reports see it, with its calibration images."""
    images = calibration_images(data, config.calibration.images, seed=config.seed)
    images = in_layout(images, accepted_layout(dense, images[:2]))
    search = options.search_options(config)
    return ImageModule(
        dense,
        data.input_shape,
        images.split(CALIBRATION_BATCH),
        data.preprocessing,
        data=data,
        images=images,
        scores=EvaluatorOptions.of(search, config.seed),
        scored_images=search.images,
        options=config.decomposition,
        export=options.export_options(config),
        folder=folder.state,
        seed=config.seed,
        cache=Cache(cache_folder()),
    )


def candidate_fits(config: AppConfig, network: ImageModule) -> FitLibrary:
    """Return the library of fits; nothing is fitted yet."""
    return network.library(
        options.candidate_options(config), cache=options.request(config).fits, seed=config.seed
    )


def search_session(config: AppConfig, network: ImageModule) -> SearchSession:
    """Return the session that the configuration's searches share."""
    return opened_session(network, options.candidate_options(config), options.request(config))


def chosen_plan(
    config: AppConfig, network: ImageModule, folder: RunFolder
) -> tuple[SearchProblem, SearchResult]:
    """Search for a plan and write it, with the preprocessing of the network's images."""
    with search_session(config, network) as session:
        result = session.search(
            *options.selector(config),
            seed=config.seed,
            folder=folder.path,
            on_episode=folder.tracking.episode,
        )
    if result.stopped_by == "interrupt":
        raise RunStoppedError(folder.path)
    if result.missed is not None:
        folder.miss(result.missed)
    plan = with_preprocessing(result.plan, network.data)
    plan.save(folder.plan)
    return session.problem, dataclasses.replace(result, plan=plan)


def finetuned(
    config: AppConfig,
    data: ImageData,
    network: nn.Module,
    dense: nn.Module,
    folder: RunFolder,
    *,
    taught_by: Teacher | None = None,
    stage: str = "finetune",
    after_removal: bool = False,
) -> Sequence[EpochRow]:
    """Fine-tune a compressed network in place, with the dense one as teacher if no other is given.

    Returns the epochs.

    With finetune.epochs=0 it stays as it is.
    """
    if config.finetune.epochs == 0:
        return []
    new = heldout_is_new(config, data)
    recipe = options.finetuning_recipe(config, after_removal=after_removal, heldout_is_new=new)
    source = dense if taught_by is None else taught_by.network
    result = _trained("fine-tune", network, data, recipe, folder, stage=stage, teacher=source)
    if taught_by is not None:
        folder.notes.trainings[stage]["teacher"] = {"name": taught_by.title, "accuracy": taught_by.accuracy}
    if recipe.restore_best and result.epoch == 0:
        aim = heldout_accuracy(dense, data)
        kept = (
            f"fine-tune: no epoch was better on the held-out images than the network was before "
            f"({100 * result.start:.1f} %, the dense one {100 * aim:.1f} %); it is handed back as it was."
        )
        if result.start < aim:
            folder.warn(f"{kept} Try another learning rate (optim.lr) or more epochs (finetune.epochs).")
        else:
            log.info("%s There was nothing to win back: finetune.epochs=0 leaves fine-tuning out.", kept)
    elif not new and result.accuracy < result.start:
        folder.warn(
            f"fine-tune: the accuracy on the held-out images fell from {100 * result.start:.1f} to "
            f"{100 * result.accuracy:.1f} %. The dense network may have been trained on them, so they cannot "
            "tell whether that is a loss; compare with finetune.epochs=0."
        )
    return result.history


def _trained(
    title: str,
    network: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    folder: RunFolder,
    *,
    stage: str,
    teacher: nn.Module | None = None,
) -> TrainingResult:
    """Train a network in place, tracked; note the learning rate that was used."""
    result = run_training(
        title,
        network,
        data,
        recipe,
        state_file=folder.training_state(stage),
        teacher=teacher,
        on_epoch=folder.tracking.epochs(stage),
    )
    folder.notes.trainings[stage] = {
        "lr": result.lr,
        "halvings": result.halvings,
        "epochs": len(result.history),
    }
    if result.halvings:
        folder.warn(
            f"{title}: the training diverged at the learning rate {recipe.lr:.3g}; after "
            f"{counted(result.halvings, 'halving')} it was followed to the end at {result.lr:.3g}."
        )
    return result


def head(
    config: AppConfig, data: ImageData, network: nn.Module, method: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the entries of metrics.json on the run itself."""
    checkpoint = config.model.get("checkpoint")
    return {
        "task": config.task,
        "model": model_title(config.model, network),
        "checkpoint": Path(checkpoint).name if checkpoint else None,
        "heldout_is_new": heldout_is_new(config, data),
        "dataset": data.name,
        "decomposition": None,
        "selector": None,
        **(method or {}),
        "seed": config.seed,
        "preprocessing": data.preprocessing.to_dict(),
    }


def searched(config: AppConfig) -> dict[str, Any]:
    """Return the method of this run's search: format, selector and budget."""
    return {
        "decomposition": config.decomposition.format,
        "selector": config.selector["name"],
        "budget": config.budget.numbers,
    }
