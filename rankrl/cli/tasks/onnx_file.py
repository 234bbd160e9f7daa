"""Carry out the tasks for `model=onnx`: a network in an ONNX file, trained elsewhere."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decomposition import CompressionPlan
from rankrl import compression
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.cli.tasks.compression import method_of
from rankrl.cli.tasks.overviews import cost_cells, finished_files, print_wide, show
from rankrl.errors import ConfigError, ExportError, counted
from rankrl.file_compression import FileSource, apply_to_file, write_file_kit
from rankrl.kits.kit import FinishedFile, write_verify_kit
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.graph import ImagePreprocessing
from rankrl.onnx.output_scores import SCORES
from rankrl.options.names import InputsOptions
from rankrl.request import Request
from rankrl.result import Compression, run_numbers
from rankrl.runs.run_folder import RunFolder

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""The dataset that goes with it: inputs without labels."""
_LOOKED_UP = "it becomes a look-up: what it multiplies is a one-hot code"
_LITTLE = 0.5
"""Agreement with the original below which hardly anyone would use a network."""


def compress(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.onnx`, with plan, report and metrics."""
    path, inputs = _files(config)
    images = _images(config, inputs)
    if not config.budget.fractions:
        raise ConfigError(
            "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; budget.params, "
            "budget.macs and budget.bytes likewise"
        )
    axes = config.dataset.get("batch_axes")
    given = options.verb_arguments(config)
    result = compression.compress(path, inputs, folder, images=images, batch_axes=axes, **given)
    result.plan.save(folder.plan)
    if result.missed is not None:
        folder.miss(result.missed)
    further: dict[str, Any] = {
        "decomposition": config.decomposition.format,
        "selector": given["selector"],
        "budget": config.budget.numbers,
    }
    _report(config, folder, result, images, further)


def apply(config: AppConfig, folder: RunFolder) -> None:
    """Apply a plan and write the network as `model.onnx`."""
    source = _source(config)
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    result = apply_to_file(source, plan, folder.onnx, _request(config))
    plan.save(folder.plan)
    _report(config, folder, result, source.images, method_of(plan))


def timing_kit(config: AppConfig, folder: RunFolder) -> None:
    """Write the kit."""
    config = options.for_kit(config, folder.kit)
    show(write_file_kit(_source(config), _request(config), folder.kit))


def verify_kit(config: AppConfig, folder: RunFolder) -> None:
    """Write the kit of the finished runs below `runs`, with the original in float32 and in integers."""
    finished, numbers = finished_files(config.runs)
    source, request = _source(config), _request(config)
    file = source.read(request)
    files = [FinishedFile("original", source.path, numbers["dense"])]
    try:
        path = folder.state / "int8.onnx"
        quantise_onnx(source.path, path, file.split.calibration, cut=file.split.axes.parts)
        files.append(FinishedFile("original in int8", path))
    except ExportError as error:
        log.warning("the original in 8-bit integers is left out: %s", error)
    feed = file.feed(request.timing.batch)
    show(write_verify_kit([*files, *finished], feed, folder.kit, request.timing), then="")


def inspect(config: AppConfig, folder: RunFolder) -> None:
    """Print one row for each node: shape, cost, and the reason if it cannot be compressed."""
    del folder
    source = _source(config)
    path, given = source.path, source.read(_request(config))
    sites, totals = given.sites, given.totals
    table = Table(title=f"{path.name}: {totals['params']:,} parameters, {totals['macs']:,} MACs")
    table.add_column("node", overflow="fold")  # never cut, as plans need the whole name
    table.add_column("operator")
    table.add_column("weight", no_wrap=True)
    for column in ("params", "share", "MACs", "share"):
        table.add_column(column, justify="right")
    table.add_column("stays because")
    for site in sites:
        spec = site.spec
        table.add_row(
            spec.name,
            site.op_type,
            *cost_cells(spec, totals["params"], totals["macs"]),
            spec.refusal or "",
        )
    for site in given.looked_up:
        table.add_row(
            site.name, site.op_type, "x".join(map(str, site.spec.weight_shape)), *[""] * 4, _LOOKED_UP
        )
    print_wide(table)


def _source(config: AppConfig) -> FileSource:
    """Return the network and its inputs."""
    path, inputs = _files(config)
    images = _images(config, inputs)
    metric: Any = config.search.metric  # checked there, with a message for users
    return FileSource(path, inputs, images, config.dataset.get("batch_axes"), metric=metric)


def _request(config: AppConfig) -> Request:
    """Return the request."""
    request = options.request(config)
    return replace(request, decomposition=request.decomposition.of_file())


def _report(
    config: AppConfig,
    folder: RunFolder,
    result: Compression,
    images: ImagePreprocessing | None,
    further: dict[str, Any],
) -> None:
    """Write the metrics and the report."""
    metrics = {
        "task": config.task,
        "model": Path(config.model["path"]).stem,
        "dataset": Path(config.dataset["path"]).name,
        **({} if images is None else {"preprocessing": asdict(images)}),
        **further,
        "seed": config.seed,
        **run_numbers(result),
    }
    agreement = metrics["compressed"]["agreement"]
    if result.collapsed is not None:
        folder.collapse(result.collapsed)
    elif agreement < _LITTLE:
        folder.warn(
            f"the agreement with the original is {agreement:.2f}, of 1, on "
            f"{counted(result.heldout, 'held-out input')}: ask for a larger budget, or give more inputs"
        )
    Console().print(_outputs(result))
    steps.finish(folder, metrics, layers=result.layers)


def _files(config: AppConfig) -> tuple[Path, Path]:
    """Return the paths of the network and of its inputs."""
    name = config.dataset.get("name")
    if name != INPUTS:
        raise ConfigError(
            f"model=onnx takes its inputs from a file, but dataset={name} is chosen; give "
            f"dataset={INPUTS} dataset.path=inputs.npz, one array for each input of the network"
        )
    return Path(config.model["path"]), Path(config.dataset["path"])


def _images(config: AppConfig, inputs: Path) -> ImagePreprocessing | None:
    """Return the preprocessing of images; None if the inputs are no images."""
    values = {name: config.dataset[name] for name in ("size", "resize", "scale", "order", "mean", "std")}
    if inputs.is_dir():
        return ImagePreprocessing(**values)
    defaults = {each.name: each.default for each in fields(InputsOptions)}
    given = [name for name, value in values.items() if value != defaults[name]]
    if given:
        raise ConfigError(
            f"dataset.{given[0]} is for a folder of images; {inputs} is none, and arrays in a file are taken "
            "as they are. Leave it out"
        )
    return None


def _outputs(result: Compression) -> Table:
    """Return the table of outputs."""
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
