"""Read networks and data from the configuration for the verbs, and report what they returned."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from decomposition import FitLibrary
from rankrl.cli.config import compose, options
from rankrl.cli.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.errors import ConfigError, counted
from rankrl.models import checkpoint_heldout, save_checkpoint
from rankrl.module_compression import image_classifier, train_in
from rankrl.networks.module import FileModule, ModuleNetwork
from rankrl.onnx.graph import ImagePreprocessing
from rankrl.onnx.output_scores import SCORES
from rankrl.options.names import InputsOptions
from rankrl.plan_search.run import search_numbers
from rankrl.plan_search.session import check_reachable
from rankrl.report import (
    LayerRow,
    conclusion,
    device_table,
    heldout_note,
    measured_table,
    runtimes_table,
    summary_table,
)
from rankrl.result import Compression, MeasuredModule, missed_memory, run_numbers, write_run
from rankrl.runs.run_folder import RunFolder
from rankrl.training import EpochRow, TrainingResult, guessing_share
from rankrl.training.networks import (
    Teacher,
    build_network,
    guessing_warning,
    model_title,
    read_teacher,
    write_training_step,
)
from rankrl.verify.certificate import accuracy_collapse

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""The dataset of model=onnx: inputs without labels."""
_LITTLE = 0.5
"""Agreement with the original below which hardly anyone would use a network."""


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
    request = options.request(config)
    check_reachable(ModuleNetwork(network, data.input_shape), request.timed_candidates(), request.goal)


def heldout_is_new(config: AppConfig, data: ImageData) -> bool:
    """Tell whether the dense network is known to be trained without the held-out images."""
    checkpoint = config.model.get("checkpoint")
    return not checkpoint or checkpoint_heldout(checkpoint) == data.heldout.digest()


def dense_training(
    config: AppConfig, data: ImageData, network: nn.Module, folder: RunFolder
) -> TrainingResult:
    """Train the dense network in place and save it; warn if it is no better than guessing."""
    recipe = options.training_recipe(config, network)
    result = train_in(folder, "train", network, data, recipe)
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


def in_file(config: AppConfig) -> bool:
    """Tell whether the network is an ONNX file, trained elsewhere."""
    return bool(config.model.get("architecture") == "onnx")


def file_inputs(config: AppConfig) -> tuple[Path, Path, dict[str, Any]]:
    """Return the paths of an ONNX file and of its inputs, and how these are read, for the verbs."""
    given = config.dataset
    if given.get("name") != INPUTS:
        raise ConfigError(
            f"model=onnx takes its inputs from a file, but dataset={given.get('name')} is chosen; give "
            f"dataset={INPUTS} dataset.path=inputs.npz, one array for each input of the network"
        )
    inputs = Path(given["path"])
    values = {name: given[name] for name in ("size", "resize", "scale", "order", "mean", "std")}
    defaults = {each.name: each.default for each in dataclasses.fields(InputsOptions)}
    set_here = [name for name, value in values.items() if value != defaults[name]]
    if set_here and not inputs.is_dir():
        raise ConfigError(
            f"dataset.{set_here[0]} is for a folder of images; {inputs} is none, and arrays in a file are "
            "taken as they are. Leave it out"
        )
    images = ImagePreprocessing(**values) if inputs.is_dir() else None
    return Path(config.model["path"]), inputs, {"images": images, "batch_axes": given.get("batch_axes")}


def searched_network(config: AppConfig, data: ImageData, dense: nn.Module, folder: RunFolder) -> FileModule:
    """Return the dense network as searches and reports see it, with its calibration images."""
    return image_classifier(dense, data, options.request(config), folder.state)


def candidate_fits(config: AppConfig, network: FileModule) -> FitLibrary:
    """Return the library of fits; nothing is fitted yet."""
    request = options.request(config)
    return network.library(request.timed_candidates(), cache=request.fits, seed=config.seed)


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


def file_head(
    config: AppConfig, images: ImagePreprocessing | None, method: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of metrics.json on a run for an ONNX file."""
    return {
        "task": config.task,
        "model": Path(config.model["path"]).stem,
        "dataset": Path(config.dataset["path"]).name,
        **({} if images is None else {"preprocessing": dataclasses.asdict(images)}),
        **method,
        "seed": config.seed,
    }


def searched(config: AppConfig) -> dict[str, Any]:
    """Return the method of this run's search: format, selector and budget."""
    return {
        "decomposition": config.decomposition.format,
        "selector": config.selector["name"],
        "budget": options.search_goal(config).budget_numbers,
    }


def finish_compressed(config: AppConfig, result: MeasuredModule | Compression, folder: RunFolder) -> None:
    """Report a compressed network."""
    searched = {} if result.search is None else search_numbers(result.search)
    metrics = {**folder.notes.about, **run_numbers(result), **searched}
    if isinstance(result, MeasuredModule):
        missed = missed_memory(config.budget.memory, result.before, result.after)
        exported_step(config, result.model, folder)
    else:
        missed = result.missed
        Console().print(_outputs(result))
    if missed is not None:
        folder.miss(missed)
    if result.collapsed is not None:
        log.error(result.collapsed)
        folder.collapse(result.collapsed)
    elif not isinstance(result, MeasuredModule) and metrics["compressed"]["agreement"] < _LITTLE:
        folder.warn(
            f"the agreement with the original is {metrics['compressed']['agreement']:.2f}, of 1, on "
            f"{counted(result.heldout, 'held-out input')}: ask for a larger budget, or give more inputs"
        )
    epochs = result.epochs if isinstance(result, MeasuredModule) else ()
    finish(folder, metrics, layers=result.layers, epochs=epochs)


def _outputs(result: Compression) -> Table:
    """Return the table of a file's outputs."""
    table = Table(title=f"Agreement with the original on {counted(result.heldout, 'held-out input')}")
    table.add_column("output", overflow="fold")
    table.add_column("agreement", justify="right")
    table.add_column("relative error", justify="right")
    table.add_column("agreement is", overflow="fold")
    for each in result.outputs:
        meaning = f"{SCORES[each.kind]}, since {each.reason}"
        table.add_row(each.name, f"{each.score:.2%}", f"{each.error:.4f}", meaning)
        for unit in each.units:
            table.add_row(
                f"{each.name}[{unit.channels}]", f"{unit.score:.2%}", f"{unit.error:.4f}", "the same"
            )
    return table


def exported_step(config: AppConfig, network: nn.Module, folder: RunFolder) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if config.export.training:
        epochs = max(1, config.finetune.epochs)  # a recipe needs one; a step does not depend on their number
        finetune = dataclasses.replace(config.finetune, epochs=epochs)
        recipe = options.finetuning_recipe(dataclasses.replace(config, finetune=finetune))
        write_training_step(network, recipe, folder.optimizer_step)


def finish(
    folder: RunFolder,
    metrics: dict[str, Any],
    *,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> None:
    """Write the run's report and metrics, and print the final table."""
    metrics.pop("epochs", None)
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
