"""Steps that several tasks share: they read the configuration and call the workflow."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from decomposition import CompressionPlan, FitLibrary, apply_plan
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.data.calibration import CALIBRATION_BATCH, calibration_images
from rankrl.device import accepted_layout, in_layout
from rankrl.errors import RunStoppedError
from rankrl.files import write_json
from rankrl.models import checkpoint_heldout, save_checkpoint
from rankrl.networks.module import ModuleNetwork
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report import (
    LayerRow,
    collect_setup,
    conclusion,
    heldout_note,
    runtimes_table,
    summary_table,
    write_report,
)
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import EpochRow, TrainingRecipe, TrainingResult, guessing_share
from rankrl.training.networks import (
    build_network,
    guessing_warning,
    heldout_accuracy,
    model_title,
    run_training,
)
from rankrl.training.training_step import write_training_step
from rankrl.verify.collapse import accuracy_collapse
from rankrl.verify.measure import with_preprocessing
from rankrl.wording import counted

log = logging.getLogger(__name__)


def dense_network(config: AppConfig, data: ImageData, folder: RunFolder) -> nn.Module:
    """Return the dense network: from its checkpoint, or trained here; warn if it has learned nothing."""
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


def check_budget(config: AppConfig, data: ImageData) -> None:
    """Refuse a budget that the network cannot be brought to, before it is trained for that.

    Raises:
        RankrlError: The network cannot be built.
        DecompositionError: No plan can reach the budget.
    """
    if config.model.get("checkpoint"):  # nothing is trained, and the search itself looks before it fits
        return
    network = build_network(config.model, data, seed=config.seed)
    check_reachable(
        ModuleNetwork(network, data.input_shape),
        options.candidate_options(config),
        options.search_goal(config),
    )


def heldout_is_new(config: AppConfig, data: ImageData) -> bool:
    """Tell whether the dense network is known not to have been trained on the held-out images."""
    checkpoint = config.model.get("checkpoint")
    return not checkpoint or checkpoint_heldout(checkpoint) == data.heldout.digest()


def dense_training(
    config: AppConfig, data: ImageData, network: nn.Module, folder: RunFolder
) -> TrainingResult:
    """Train the dense network in place and save it; warn if it has learned nothing."""
    recipe = options.training_recipe(config, network)
    result = _trained("train", network, data, recipe, folder, stage="train")
    save_checkpoint(network, folder.dense, heldout=data.heldout.digest())
    warning = guessing_warning(network, data)
    if warning is not None:
        folder.warn(
            f"{warning}. It was trained for {counted(recipe.epochs, 'epoch')} (train.epochs) at the learning "
            f"rate {result.lr:.3g} (train.optim.lr). Train it longer or at another rate, or give trained "
            "weights with model.checkpoint=PATH."
        )
    return result


def calibration(config: AppConfig, data: ImageData, network: nn.Module) -> Tensor:
    """Return the images that the network's layers are fitted on."""
    images = calibration_images(data, config.calibration.images, seed=config.seed)
    return in_layout(images, accepted_layout(network, images[:2]))


def searched_network(config: AppConfig, data: ImageData, dense: nn.Module, images: Tensor) -> ModuleNetwork:
    """Return the dense network as searches see it, calibrated on `images`."""
    return ModuleNetwork(
        dense,
        data.input_shape,
        images.split(CALIBRATION_BATCH),
        apply=lambda plan: applied_plan(config, data, plan, dense, images),
        preprocessing=data.preprocessing,
    )


def candidate_fits(config: AppConfig, network: ModuleNetwork) -> FitLibrary:
    """Return the library of fits; nothing is fitted yet."""
    return network.library(options.candidate_options(config), cache=cache_folder() / "fits", seed=config.seed)


def search_session(config: AppConfig, data: ImageData, dense: nn.Module, images: Tensor) -> SearchSession:
    """Return the session that the configuration's searches share."""
    network = searched_network(config, data, dense, images)
    return SearchSession(
        network,
        candidate_fits(config, network),
        options.scoring(config, data, dense),
        options.search_goal(config),
        candidates=options.candidate_options(config).candidates,
    )


def chosen_plan(
    config: AppConfig, data: ImageData, dense: nn.Module, images: Tensor, folder: RunFolder
) -> tuple[SearchProblem, SearchResult]:
    """Search for a plan and write it, with what the network's images go through.

    Returns:
        What was searched over and what was found.

    Raises:
        RunStoppedError: If the user stopped the search.
    """
    selector, selector_options = options.selector(config)
    with search_session(config, data, dense, images) as session:
        result = session.search(
            selector,
            selector_options,
            seed=config.seed,
            folder=folder.path,
            on_episode=folder.tracking.episode,
        )
    if result.stopped_by == "interrupt":
        raise RunStoppedError(folder.path)
    if result.missed is not None:
        folder.miss(result.missed)
    plan = with_preprocessing(result.plan, data)
    plan.save(folder.plan)
    return session.problem, dataclasses.replace(result, plan=plan)


def applied_plan(
    config: AppConfig, data: ImageData, plan: CompressionPlan, dense: nn.Module, images: Tensor
) -> nn.Module:
    """Return the compressed network."""
    log.info("applying the plan, layer by layer")
    return apply_plan(
        dense,
        plan,
        images,
        sequential=config.decomposition.sequential,
        weigh_outputs=config.decomposition.weigh_outputs,
        options=config.decomposition.final_fit(),
        seed=config.seed,
        statistics=calibration_images(data, len(images), seed=config.seed, augmented=True),
    )


def finetuned(
    config: AppConfig,
    data: ImageData,
    network: nn.Module,
    dense: nn.Module,
    folder: RunFolder,
    *,
    stage: str = "finetune",
    after_removal: bool = False,
) -> Sequence[EpochRow]:
    """Fine-tune a compressed network in place with the dense one as teacher; return the epochs.

    With finetune.epochs=0 it stays as it is.
    """
    if config.finetune.epochs == 0:
        return []
    new = heldout_is_new(config, data)
    recipe = options.finetuning_recipe(config, after_removal=after_removal, heldout_is_new=new)
    result = _trained("fine-tune", network, data, recipe, folder, stage=stage, teacher=dense)
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
        state_file=folder.state / f"{stage}.safetensors",
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


def check_collapse(
    folder: RunFolder, metrics: Mapping[str, Any], data: ImageData, baseline: float | None = None
) -> None:
    """Note if the accuracy of the last network among the metrics has fallen to that of guessing.

    Args:
        folder: The run's folder.
        metrics: Its numbers.
        data: The dataset.
        baseline: Accuracy of the network before; that among the metrics when omitted.
    """
    last = metrics.get("finetuned") or metrics["compressed"]
    before = metrics["baseline"]["accuracy"] if baseline is None else baseline
    share = guessing_share(data.heldout.y)
    text = accuracy_collapse(last["accuracy"], before, share, len(data.test))
    if text is not None:
        log.error(text)
        folder.collapse(text)


def exported_step(config: AppConfig, network: nn.Module, folder: RunFolder) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if config.export.training:
        epochs = max(1, config.finetune.epochs)  # a step does not depend on how many would follow
        finetune = dataclasses.replace(config.finetune, epochs=epochs)
        recipe = options.finetuning_recipe(dataclasses.replace(config, finetune=finetune))
        write_training_step(network, recipe, folder.optimizer_step)


def head(
    config: AppConfig, data: ImageData, network: nn.Module, method: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Return what metrics.json says of the run itself.

    Args:
        config: The configuration.
        data: The dataset.
        network: The dense network, as it was built.
        method: What a network was compressed with (`searched`, `compressed.method_of`); None for nothing.
    """
    checkpoint = config.model.get("checkpoint")
    return {
        "task": config.task,
        "model": model_title(config.model, network),
        "checkpoint": Path(checkpoint).name if checkpoint else None,
        "dataset": data.name,
        "decomposition": None,
        "selector": None,
        **(method or {}),
        "seed": config.seed,
        "preprocessing": data.preprocessing.to_dict(),
    }


def searched(config: AppConfig) -> dict[str, str | None]:
    """Return what a search of this run compresses a network with: the format and the selector."""
    return {"decomposition": config.decomposition.format, "selector": config.selector["name"]}


def file_metadata(plan: CompressionPlan, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return what an ONNX file is to hold beside the graph and its preprocessing.

    How long the search took is left out: the file of a resumed run is that of an undisturbed one.
    """
    numbers = {key: value for key, value in metrics.items() if key != "preprocessing"}
    if "search" in numbers:
        numbers["search"] = {key: value for key, value in numbers["search"].items() if key != "seconds"}
    return {"plan": plan.to_json(), "metrics": json.dumps(numbers)}


def track_result(folder: RunFolder, metrics: Mapping[str, Any]) -> None:
    """Hand the results among the metrics to the trackers."""
    given = ("seed", "preprocessing")
    folder.tracking.result({key: value for key, value in metrics.items() if key not in given})


def finish(
    folder: RunFolder,
    metrics: dict[str, Any],
    *,
    seed: int,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> None:
    """Write the report and, last, metrics.json, which marks the run as finished; print the final table."""
    if epochs:
        metrics["epochs"] = [dataclasses.asdict(row) for row in epochs]
    add_notes(metrics, folder)
    setup = collect_setup(["rankrl", *sys.argv[1:]], seed)
    page = write_report(folder.path, metrics=metrics, layers=layers, epochs=epochs, setup=setup)
    track_result(folder, metrics)
    write_json(folder.metrics, metrics)
    console = Console()
    for table in (summary_table(metrics), runtimes_table(metrics)):
        if table.row_count:
            console.print(table)
    print_end(console, metrics, page)


def add_notes(metrics: dict[str, Any], folder: RunFolder) -> None:
    """Add what the steps of the run noted: its trainings and warnings."""
    if folder.notes.trainings:
        metrics["trainings"] = folder.notes.trainings
    metrics["warnings"] = folder.notes.warnings


def print_end(console: Console, metrics: Mapping[str, Any], page: Path) -> None:
    """Print below the final table what its reader must know, and where the report is."""
    if any(metrics.get(key) for key in ("search", "epochs")) and heldout_note(metrics):
        console.print(heldout_note(metrics), soft_wrap=True, markup=False, highlight=False)
    for warning in metrics["warnings"]:
        console.print(
            f"warning: {warning}", style="bold yellow", soft_wrap=True, markup=False, highlight=False
        )
    sentence = conclusion(metrics)
    if sentence:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    console.print(f"report: {page}", soft_wrap=True)
