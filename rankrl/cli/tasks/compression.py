"""Train, compress, fine-tune, evaluate and export networks: a task each, and the end that tasks share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from decomposition import CompressionPlan, save_compressed
from pruning import PruningError
from rankrl import compression
from rankrl.cli.config import compose
from rankrl.cli.tasks.task_run import TaskRun, method_of, only_removes
from rankrl.compression import apply_plan, compress
from rankrl.errors import CheckpointError, ConfigError, counted
from rankrl.module_compression import file_metadata, finetune_in
from rankrl.onnx.output_scores import SCORES
from rankrl.onnx.runtimes import check_runtimes
from rankrl.plan_search.run import search_numbers
from rankrl.pruners.prune import PruningSteps, check_target, compress_pruned
from rankrl.report import LayerRow, conclusion
from rankrl.report.run_tables import (
    Table,
    device_table,
    heldout_note,
    measured_table,
    runtimes_table,
    summary_table,
)
from rankrl.result import Compression, MeasuredModule, run_numbers, write_run
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.training import EpochRow, guessing_share
from rankrl.training.epochs import extend_training
from rankrl.training.networks import heldout_accuracy, write_training_step
from rankrl.verify.agreement import accuracy_collapse
from rankrl.verify.measure import layer_rows, network_numbers, test_accuracy, with_preprocessing

log = logging.getLogger(__name__)
_LITTLE = 0.5
"""Agreement with the original below which hardly anyone would use a network."""


def train(run: TaskRun) -> None:
    """Train and write `dense.safetensors`."""
    run.training_recipe()
    epochs = run.train_dense().history
    finish(run.folder, {**run.head(), "baseline": network_numbers(run.network, run.data)}, epochs=epochs)


def pipeline(run: TaskRun) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    tuning = run.config.finetune.epochs > 0 and not run.in_file
    run.check_before_training(finetuning=tuning)
    further: dict[str, Any] = {} if run.in_file else {"teacher": run.teacher}
    if run.in_file and not run.config.budget.fractions:
        raise ConfigError(
            "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; "
            "budget.params, budget.macs and budget.bytes likewise"
        )
    network, inputs, told = run.given()
    if tuning:
        further["finetune"] = run.finetuning_recipe(heldout_is_new=run.heldout_is_new)
    run.folder.notes.about.update(run.head(run.searched))
    result: Any = compress(network, inputs, run.folder, **run.verb_arguments(), **told, **further)
    finish_compressed(run, result)


def search(run: TaskRun) -> None:
    """Search and write the plan; no test image is read."""
    run.check_before_training(finetuning=False)
    network, data, told = run.given()
    found = compression.search(network, data, folder=run.folder, **told, **run.verb_arguments())
    metrics = {**run.head(run.searched), **search_numbers(found), "ratios": found.ratios}
    finish(run.folder, metrics, layers=layer_rows(found.plan, network))


def apply(run: TaskRun) -> None:
    """Write the compressed network as `model.safetensors`, that of an ONNX file as `model.onnx`."""
    config, folder = run.config, run.folder
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    asked: dict[str, Any] = {"decomposition": config.decomposition, "seed": config.seed}
    if run.in_file:
        network, inputs, told = run.given()
        asked |= {"timing": run.goal.timing, "cache": cache_folder()}
        result = apply_plan(network, plan, inputs, folder.onnx, **asked, **told)
        plan.save(folder.plan)
        folder.notes.about.update(run.head(method_of(plan)))
        finish_compressed(run, result)
        return
    with run.fitting(f"plan={config.plan}"):  # before a network is trained for it
        plan.specs(run.network)
    plan = with_preprocessing(plan, run.data.preprocessing)
    dense, data, told = run.given()
    compressed = apply_plan(dense, plan, data, **asked, **told)
    _save(folder, compressed, plan, dense)
    metrics = run.numbers(dense, compressed, plan)
    _check_collapse(run, metrics, metrics["baseline"]["accuracy"])
    finish(folder, metrics, layers=layer_rows(plan, dense, compressed))


def prune(run: TaskRun) -> None:
    """Remove channels or blocks, decompose what is left if asked, fine-tune, verify and time."""
    pruning, left, epochs = run.pruning(), run.config.prune.budget, run.config.prune.finetune_epochs
    decomposing = None if left is None else TaskRun(replace(run.config, budget=left), run.folder)
    (decomposing or run).check(finetuning=run.config.finetune.epochs > 0)
    run.tuning_recipe(epochs=epochs, after_removal=True)
    try:
        check_target(run.network, run.data.input_shape, pruning)
    except PruningError as error:
        raise ConfigError(f"the network cannot be pruned as asked: {error}") from error
    teacher, dense, new = run.teacher, run.dense, run.heldout_is_new
    following = PruningSteps(
        run.tuning_recipe(after_removal=decomposing is None, heldout_is_new=new),
        None if decomposing is None else decomposing.request(),
        None
        if decomposing is None
        else run.tuning_recipe(epochs=epochs, after_removal=True, heldout_is_new=new),
        teacher,
        new,
    )
    method = {} if decomposing is None else run.searched
    run.folder.notes.about.update(run.head({**method, "pruner": run.config.pruner["name"]}))
    result = compress_pruned(dense, run.data, run.folder, pruning, following, run.request())
    finish_compressed(run, result)


def finetune(run: TaskRun) -> None:
    """Write the fine-tuned network as `model.safetensors`."""
    recipe = run.finetuning_recipe()
    network, dense, plan = run.compressed()
    plan = with_preprocessing(plan, run.data.preprocessing)
    if recipe.distillation > 0 and run.teacher is None and not run.checkpoint:
        raise ConfigError(
            "task=finetune distils from the dense network: give its weights with model.checkpoint=PATH or "
            "another teacher with finetune.teacher=PATH, or set finetune.distillation=0"
        )
    metrics, new = run.numbers(dense, network, plan), run.heldout_is_new
    with _taken_up(run):
        recipe = run.finetuning_recipe(after_removal=only_removes(plan), heldout_is_new=new)
        told: dict[str, Any] = {"teacher": run.teacher, "heldout_is_new": new}
        epochs = finetune_in(run.folder, network, run.data, recipe, dense, **told)
    _save(run.folder, network, plan, dense)
    metrics["finetuned"] = {"accuracy": test_accuracy(network, run.data)}
    before = heldout_accuracy(dense, run.data) if run.checkpoint else metrics["compressed"]["accuracy"]
    _check_collapse(run, metrics, before)
    finish(run.folder, metrics, epochs=epochs)


@contextmanager
def _taken_up(run: TaskRun) -> Iterator[None]:
    """Continue the fine-tuning of the run that `run` names, if it kept its state."""
    earlier = RunFolder(Path(run.config.run or ""))
    own, before = (folder.training_state("finetune") for folder in (run.folder, earlier))
    if not run.config.run or own.exists() or not before.is_file():
        yield
        return
    extend_training(before, own, run.config.finetune.epochs)
    try:
        yield
    except CheckpointError as error:
        own.unlink()
        raise ConfigError(
            f"run={run.config.run} goes on with a fine-tuning as it began, but for finetune.epochs: {error} "
            f"A new one begins with weights={run.config.weights}, without run"
        ) from error


def evaluate(run: TaskRun) -> None:
    """Measure the dense network, the compressed one, or both."""
    if not run.config.weights and not run.checkpoint:
        raise ConfigError(
            "task=evaluate needs a trained network: model.checkpoint=PATH, weights=RUN/model.safetensors, "
            "or both"
        )
    if run.config.weights:
        network, dense, plan = run.compressed()
        metrics = run.numbers(dense, network, plan)
    else:
        metrics = {**run.head(), "baseline": network_numbers(run.network, run.data)}
    finish(run.folder, metrics)


def export(run: TaskRun) -> None:
    """Write `model.onnx`, compare it with PyTorch and time it along with the dense network."""
    check_runtimes(run.config.export)  # before anything is read
    network, dense, plan = run.compressed()
    metrics = run.numbers(dense, network, plan)
    ratios = metrics.pop("ratios")
    file = run.searched_network(dense).write(network, run.folder.onnx, file_metadata(plan, metrics))
    _write_step(run, network)
    measured = {"ratios": {**ratios, "latency": file.latency.ratio}, "onnx": dict(file.numbers)}
    finish(run.folder, {**metrics, **measured, "runtimes": file.runtimes})


def _save(folder: RunFolder, network: nn.Module, plan: CompressionPlan, dense: nn.Module) -> None:
    save_compressed(network, plan, folder.model, dense=dense)
    plan.save(folder.plan)


def finish_compressed(run: TaskRun, result: MeasuredModule | Compression) -> None:
    folder, searched = run.folder, {} if result.search is None else search_numbers(result.search)
    metrics = {**folder.notes.about, **run_numbers(result), **searched}
    if isinstance(result, MeasuredModule):
        _write_step(run, result.model)
    else:
        Console().print(_outputs(result))
    told = result if isinstance(result, Compression) else result.search  # the search, where there is no file
    missed = None if told is None else told.missed
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
    rows = []
    for each in result.outputs:
        meaning = f"{SCORES[each.kind]}, since {each.reason}"
        rows.append([each.name, f"{each.score:.2%}", f"{each.error:.4f}", meaning])
        for unit in each.units:
            name = f"{each.name}[{unit.channels}]"
            rows.append([name, f"{unit.score:.2%}", f"{unit.error:.4f}", "the same"])
    columns = ["output", "agreement", "relative error", "agreement is"]
    title = f"Agreement with the original on {counted(result.heldout, 'held-out input')}"
    return Table("", columns, rows, text_columns=(0, 3), title=title)


def _write_step(run: TaskRun, network: nn.Module) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if run.config.export.training:
        # A recipe needs an epoch; a step does not depend on their number.
        recipe = run.finetuning_recipe(epochs=max(1, run.config.finetune.epochs))
        write_training_step(network, recipe, run.folder.optimizer_step)


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
        metrics["epochs"] = [asdict(row) for row in epochs]
    add_notes(metrics, folder)
    page = write_run(folder, metrics, command=command(), layers=layers, epochs=epochs)
    tables = (measured_table, device_table, runtimes_table, summary_table)
    print_end(metrics, page, [make(metrics) for make in tables])


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


def print_end(metrics: Mapping[str, Any], page: Path, tables: Sequence[Table]) -> None:
    """Print the tables that have rows, and below them the warnings and the path of the report."""
    console = Console()
    for table in filter(None, tables):
        console.print(table)
    plain: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
    if any(metrics.get(key) for key in ("search", "epochs")) and heldout_note(metrics):
        console.print(heldout_note(metrics), **plain)
    for warning in metrics["warnings"]:
        console.print(f"warning: {warning}", style="bold yellow", **plain)
    if conclusion(metrics):
        console.print(conclusion(metrics), **plain)
    console.print(f"report: {page}", soft_wrap=True)


def _check_collapse(run: TaskRun, metrics: Mapping[str, Any], before: float) -> None:
    """Warn if the accuracy of the last network in the metrics is no better than guessing."""
    last, data = metrics.get("finetuned") or metrics["compressed"], run.data
    text = accuracy_collapse(last["accuracy"], before, guessing_share(data.heldout.y), len(data.test))
    if text is not None:
        log.error(text)
        run.folder.collapse(text)
