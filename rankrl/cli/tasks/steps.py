"""Carry out the steps that tasks share: load, calibrate, fine-tune, export, verify, report."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from decomposition import CompressionPlan, FitLibrary, save_compressed
from decomposition.cache import Cache
from decomposition.network.surgery import copied
from rankrl.cli.config import compose, options
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.errors import RunStoppedError, counted
from rankrl.models import checkpoint_heldout, save_checkpoint
from rankrl.networks.module import (
    FileModule,
    ModuleNetwork,
    calibrating_images,
    heldout_scoring,
    image_network,
)
from rankrl.plan_search.run import ChosenPlan, SearchResult
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report import (
    LayerRow,
    conclusion,
    device_table,
    heldout_note,
    measured_table,
    runtimes_table,
    summary_table,
)
from rankrl.request import opened_session
from rankrl.result import (
    MeasuredNetwork,
    Measurement,
    evaluate_compressed,
    measurement,
    run_numbers,
    write_run,
)
from rankrl.result import finish as measured_file
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import EpochRow, TrainingRecipe, TrainingResult, guessing_share
from rankrl.training.networks import (
    Teacher,
    build_network,
    guessing_warning,
    heldout_accuracy,
    model_title,
    read_teacher,
    run_training,
    write_training_step,
)
from rankrl.verify.certificate import accuracy_collapse
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


def image_scoring(config: AppConfig, data: ImageData, network: nn.Module) -> ImageScoring:
    """Return the scoring of a network's plans on held-out images."""
    return heldout_scoring(network, data, options.search_options(config), seed=config.seed)


def searched_network(config: AppConfig, data: ImageData, dense: nn.Module, folder: RunFolder) -> FileModule:
    """Return the dense network as searches and reports see it, with its calibration images."""
    return image_network(
        dense,
        data,
        calibrating_images(dense, data, config.calibration.images, seed=config.seed),
        image_scoring(config, data, dense),
        config.decomposition,
        options.export_options(config),
        folder.state,
        seed=config.seed,
        cache=Cache(cache_folder()),
    )


def candidate_fits(config: AppConfig, network: FileModule) -> FitLibrary:
    """Return the library of fits; nothing is fitted yet."""
    return network.library(
        options.candidate_options(config), cache=options.request(config).fits, seed=config.seed
    )


def search_session(config: AppConfig, network: FileModule) -> SearchSession:
    """Return the session that the configuration's searches share."""
    return opened_session(network, options.candidate_options(config), options.request(config))


def chosen_plan(
    config: AppConfig, data: ImageData, network: FileModule, folder: RunFolder
) -> tuple[SearchProblem, ChosenPlan]:
    """Search for a plan and write it, with the preprocessing of the network's images."""
    with search_session(config, network) as session:
        tracked = {"on_episode": folder.tracking.episode, "on_update": folder.tracking.update}
        call = options.request(config).search_call(folder.path, **tracked)
        result = session.choose(call)
    if isinstance(result, SearchResult) and result.stopped_by == "interrupt":
        raise RunStoppedError(folder.path)
    if result.missed is not None:
        folder.miss(result.missed)
    plan = with_preprocessing(result.plan, data.preprocessing)
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
    folder.notes.trainings[stage] = result.numbers
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
        "budget": options.search_goal(config).budget_numbers,
    }


def finish_compressed(
    config: AppConfig,
    data: ImageData,
    network: FileModule,
    plan: CompressionPlan,
    compressed: nn.Module,
    metrics: dict[str, Any],
    folder: RunFolder,
    *,
    taught_by: Teacher | None = None,
    after_removal: bool = False,
) -> None:
    """Fine-tune a compressed network, write it as .safetensors and ONNX, measure and report it."""
    tuned = copied(compressed)
    epochs = finetuned(
        config, data, tuned, network.model, folder, taught_by=taught_by, after_removal=after_removal
    )
    save_compressed(tuned, plan, folder.model, dense=network.model)
    search = metrics.pop("search", None)

    def notes(plan: CompressionPlan, measured: Measurement) -> dict[str, str]:
        known = {**metrics, **measured.stages(), **({} if search is None else {"search": search})}
        return file_metadata(plan, known)

    result: MeasuredNetwork
    if network.without_file:
        measured = measurement(network, plan, compressed, tuned)
        result = evaluate_compressed(network, plan, compressed, measured, tuned=tuned, budget=config.budget)
    else:
        result = measured_file(
            network, plan, compressed, folder.onnx, tuned=tuned, notes=notes, budget=config.budget
        )
    metrics.update(run_numbers(result), **({} if search is None else {"search": search}))
    exported_step(config, tuned, folder)
    if result.collapsed is not None:
        log.error(result.collapsed)
        folder.collapse(result.collapsed)
    finish(folder, metrics, layers=result.layers, epochs=epochs)


def exported_step(config: AppConfig, network: nn.Module, folder: RunFolder) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if config.export.training:
        epochs = max(1, config.finetune.epochs)  # a recipe needs one; a step does not depend on their number
        finetune = dataclasses.replace(config.finetune, epochs=epochs)
        recipe = options.finetuning_recipe(dataclasses.replace(config, finetune=finetune))
        write_training_step(network, recipe, folder.optimizer_step)


def file_metadata(plan: CompressionPlan, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an ONNX file: plan and metrics, besides graph and preprocessing.

    The search's duration is left out, so that the file of a resumed run equals that of an uninterrupted one.
    """
    numbers = {key: value for key, value in metrics.items() if key not in ("preprocessing", "layers")}
    if "search" in numbers:
        numbers["search"] = {key: value for key, value in numbers["search"].items() if key != "seconds"}
    return {"plan": plan.to_json(), "metrics": json.dumps(numbers)}


def finish(
    folder: RunFolder,
    metrics: dict[str, Any],
    *,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> None:
    """Write the run's report and metrics, and print the final table."""
    if epochs:
        metrics["epochs"] = [dataclasses.asdict(row) for row in epochs]
    add_notes(metrics, folder)
    page = write_run(folder, metrics, command=command(), layers=layers, epochs=epochs)
    console = Console()
    for make in (measured_table, device_table, runtimes_table, summary_table):
        table = make(metrics)
        if table.row_count:
            console.print(table)
    print_end(console, metrics, page)


def command() -> list[str]:
    """Return the command line as it was written, without what `compose.sweep_arguments` adds for Hydra."""
    return ["rankrl", *(each for each in sys.argv[1:] if not compose.is_added(each))]


def add_notes(metrics: dict[str, Any], folder: RunFolder) -> None:
    """Add the notes of the run's steps to the metrics, trainings and warnings; pass all to the trackers."""
    if folder.notes.trainings:
        metrics["trainings"] = folder.notes.trainings
    metrics["warnings"] = folder.notes.warnings
    inputs = ("seed", "preprocessing")
    folder.tracking.result({key: value for key, value in metrics.items() if key not in inputs})


def print_end(console: Console, metrics: Mapping[str, Any], page: Path) -> None:
    """Print the warnings and the path of the report below the final table."""
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


def check_collapse(
    folder: RunFolder, metrics: Mapping[str, Any], data: ImageData, baseline: float | None = None
) -> None:
    """Warn if the accuracy of the last network in the metrics is no better than guessing."""
    last = metrics.get("finetuned") or metrics["compressed"]
    before = metrics["baseline"]["accuracy"] if baseline is None else baseline
    share = guessing_share(data.heldout.y)
    text = accuracy_collapse(last["accuracy"], before, share, len(data.test))
    if text is not None:
        log.error(text)
        folder.collapse(text)
