"""Fine-tune, export, measure and report the compressed network at the end of a task."""

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

from decomposition import CompressionPlan, save_compressed
from decomposition.network.surgery import copied
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.data import ImageData
from rankrl.networks.image_module import ImageModule
from rankrl.report import (
    LayerRow,
    collect_setup,
    conclusion,
    device_table,
    heldout_note,
    measured_table,
    runtimes_table,
    summary_table,
    write_report,
)
from rankrl.result import MeasuredNetwork, Measurement, certificate_numbers, judged, measurement
from rankrl.result import finish as measured_file
from rankrl.runs.run_folder import RunFolder
from rankrl.training import EpochRow, guessing_share
from rankrl.training.networks import write_training_step
from rankrl.training.teachers import Teacher
from rankrl.verify.certificate import accuracy_collapse
from rankrl.verify.measure import cost_ratios

log = logging.getLogger(__name__)


def finish_compressed(
    config: AppConfig,
    network: ImageModule,
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
    epochs = steps.finetuned(
        config, network.data, tuned, network.model, folder, taught_by=taught_by, after_removal=after_removal
    )
    save_compressed(tuned, plan, folder.model, dense=network.model)
    search = metrics.pop("search", None)

    def notes(plan: CompressionPlan, measured: Measurement) -> dict[str, str]:
        metrics.update(_measured(measured), **({} if search is None else {"search": search}))
        return file_metadata(plan, metrics)

    result: MeasuredNetwork
    if network.export.skip:
        measured = measurement(network, plan, compressed, tuned)
        notes(plan, measured)
        result = judged(network, plan, compressed, measured, tuned=tuned, budget=config.budget)
        latency = {}
    else:
        result = file = measured_file(
            network, plan, compressed, folder.onnx, tuned=tuned, notes=notes, budget=config.budget
        )
        latency = {"latency": file.latency.ratio}
        metrics["onnx"], metrics["runtimes"] = dict(file.numbers), file.runtimes
        metrics["dense_int8"] = file.dense_int8
    metrics.update(certificate_numbers(result))
    exported_step(config, tuned, folder)
    metrics["ratios"] = {**cost_ratios(metrics["baseline"], metrics["compressed"]), **latency}
    if result.collapsed is not None:
        log.error(result.collapsed)
        folder.collapse(result.collapsed)
    finish(folder, metrics, seed=config.seed, layers=result.layers, epochs=epochs)


def _measured(measured: Measurement) -> dict[str, dict[str, Any]]:
    """Return the entries of metrics.json for the networks of a run, by stage."""
    return {
        "baseline": _numbers(measured.baseline_score, measured.before),
        "compressed": _numbers(measured.compressed_score, measured.after),
        "finetuned": {"accuracy": measured.score},
    }


def _numbers(accuracy: float, costs: Mapping[str, int]) -> dict[str, Any]:
    return {"accuracy": accuracy, "params": costs["params"], "macs": costs["macs"]}


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


def track_result(folder: RunFolder, metrics: Mapping[str, Any]) -> None:
    """Pass the results among the metrics to the trackers."""
    inputs = ("seed", "preprocessing")
    folder.tracking.result({key: value for key, value in metrics.items() if key not in inputs})


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
    folder.finish(metrics)
    console = Console()
    for make in (measured_table, device_table, runtimes_table, summary_table):
        table = make(metrics)
        if table.row_count:
            console.print(table)
    print_end(console, metrics, page)


def add_notes(metrics: dict[str, Any], folder: RunFolder) -> None:
    """Add the notes of the run's steps to the metrics: trainings and warnings."""
    if folder.notes.trainings:
        metrics["trainings"] = folder.notes.trainings
    metrics["warnings"] = folder.notes.warnings


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
