"""Write kits that time or verify networks on other devices."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from decomposition import CompressionPlan
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.errors import ConfigError, counted
from rankrl.kits.kit_writer import FinishedFile, WrittenKit, write_verify_kit
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export import quantise_onnx
from rankrl.report.run_folder import read_metrics
from rankrl.request import write_kit
from rankrl.runs.run_folder import RunFolder
from rankrl.verify.measure import export_dense, file_batches, range_batches


def timing_kit(config: AppConfig, folder: RunFolder) -> None:
    """Write the kit of a classifier of a data set's images."""
    config = options.for_kit(config, folder.kit)
    data = options.dataset(config)
    network = steps.searched_network(config, data, steps.dense_network(config, data, folder), folder)
    show(write_kit(network, options.candidate_options(config), options.request(config), folder.kit))


def show(kit: WrittenKit, then: str = "Then search with timing.table=times.json") -> None:
    """Print the path of a kit and the next steps."""
    Console().print(
        f"kit: {counted(kit.files, 'file')}, {kit.bytes / 1e6:.1f} MB in {kit.folder}. Copy it to the device "
        f"and run `python measure.py` there, or open index.html in its browser (docs/devices.md). {then}",
        soft_wrap=True,
    )


log = logging.getLogger(__name__)


def verify_kit(config: AppConfig, folder: RunFolder) -> None:
    """Write the kit of the finished runs below `runs`, with the dense network in float32 and in integers."""
    finished, numbers = finished_files(config.runs)
    data = options.dataset(config)
    export = dataclasses.replace(options.export_options(config), pad_channels=False)
    network = steps.dense_network(config, data, folder)
    dense = FinishedFile("dense", export_dense(network, data, folder.state, export), numbers["dense"])
    files = [dense]
    try:
        path = folder.state / "dense-int8.onnx"
        quantise_onnx(dense.path, path, range_batches(data, export), reduce_range=export.reduce_range)
        files.append(FinishedFile("dense int8", path, numbers["dense int8"]))
    except ExportError as error:
        log.warning("the dense network in 8-bit integers is left out: %s", error)
    inputs, _ = next(file_batches(data.heldout.first(export.batch), export.batch, data, export))
    show(write_verify_kit([*files, *finished], inputs.numpy(), folder.kit, export), then="")


def finished_files(runs: str | Path | None) -> tuple[list[FinishedFile], dict[str, float | None]]:
    """Return the files of finished runs, and the scores of the dense network in float32 and in integers."""
    above = Path(runs or "")
    paths = [path for path in sorted(above.rglob("model.onnx")) if RunFolder(path.parent).finished]
    if not runs or not paths:
        raise ConfigError(
            f"give runs=FOLDER with task=verify_kit, a finished run or some; runs={runs} "
            "holds no model.onnx with its metrics.json"
        )
    files, dense, dense_int8 = [], None, None
    for path in paths:
        metrics = read_metrics(path.parent)
        title = path.parent.relative_to(above).as_posix()
        title = above.name if title == "." else title
        files.append(FinishedFile(title, path, _score(metrics, "compressed"), _plan(RunFolder(path.parent))))
        dense = _score(metrics, "baseline") if dense is None else dense
        dense_int8 = (metrics.get("dense_int8") or {}).get("accuracy") if dense_int8 is None else dense_int8
    return files, {"dense": dense, "dense int8": dense_int8}


def _plan(run: RunFolder) -> CompressionPlan | None:
    return CompressionPlan.load(run.plan) if run.plan.exists() else None


def _score(metrics: dict[str, Any], stage: str) -> float | None:
    stages = [metrics.get("finetuned") or {}] if stage == "compressed" else []
    for each in (*stages, metrics.get(stage) or {}):
        for name in ("accuracy", "score"):
            if each.get(name) is not None:
                return float(each[name])
    return None
