"""Export a compressed network as an ONNX file, verify it, and time it along with the dense network's."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import Inputs, calibrate_ranges
from decomposition.network.inputs import InputShape
from rankrl.data import Preprocessing
from rankrl.errors import NonFiniteError
from rankrl.files import write_atomically
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export import export_network
from rankrl.onnx.export.onnx_file import AxisNames
from rankrl.onnx.export.ranges import as_in_file
from rankrl.onnx.graph_edits import opset_of
from rankrl.onnx.protobuf import load_model, save_model
from rankrl.onnx.runtimes import Batch
from rankrl.progress import logged_seconds
from rankrl.timing import compare_latency
from rankrl.timing.form import fastest_form
from rankrl.timing.latency import LatencyComparison

log = logging.getLogger(__name__)


class FileInputs(ABC):
    """Input shape of a network's file, and the inputs with which it is calibrated, verified and timed."""

    shape: InputShape
    preprocessing: Preprocessing | None = None

    @abstractmethod
    def ranges(self) -> Iterator[Inputs]:
        """Yield the inputs that set ranges of activations, as the network takes them."""

    @abstractmethod
    def feeds(self) -> Iterator[Batch]:
        """Yield the same inputs as the file takes them."""

    @abstractmethod
    def verified(self, network: nn.Module, path: Path, scratch: Path) -> tuple[float, float | None]:
        """Compare a file with its network."""

    def scores(self, path: Path) -> dict[str, float]:
        """Return further measurements of a finished file, by their names in metrics.json."""
        return {}

    @property
    def timed(self) -> Batch | None:
        """The batch that files are timed on; `None` for random numbers."""
        return None


def export_file(
    network: nn.Module,
    baseline: Path,
    inputs: FileInputs,
    path: Path,
    *,
    opset: int | None,
    channel_block: int,
    reduce_range: bool | None,
    timing: Mapping[str, Any],
    metadata: Mapping[str, str],
    scratch: Path,
    dynamic_axes: AxisNames | None = None,
) -> tuple[dict[str, Any], LatencyComparison]:
    """Export a network, verify the file on real inputs, and time it along with the dense network.

    The file takes its name only after it was verified.
    """
    calibrate_ranges(network, inputs.ranges())
    in_file = as_in_file(network, reduce_range, inputs.ranges())
    options: dict[str, Any] = {
        "opset": opset,
        "channel_block": channel_block,
        "preprocessing": inputs.preprocessing,
        "dynamic_axes": dynamic_axes,
    }
    fastest, execution, timed = fastest_form(
        in_file, inputs.shape, scratch, timing=timing, timed=inputs.timed, **options
    )
    unverified = scratch / "unverified.onnx"
    if timed is None:
        feeds = inputs.feeds()
        options |= {"metadata": metadata, "reduce_range": reduce_range}
        version = export_network(fastest, unverified, inputs.shape, feeds, **options).opset
    else:
        model = load_model(timed)
        model.metadata_props.update({**metadata, **model.metadata_props})
        save_model(model, unverified)
        version = opset_of(model)
    difference, agreement = inputs.verified(in_file, unverified, scratch)
    write_atomically(path, unverified.read_bytes())
    unverified.unlink()
    scores = inputs.scores(path)
    latency = compare_latency(baseline, path, inputs=inputs.timed, **timing)
    warn_if_busy(latency.busy)
    section = {
        "max_abs_difference": difference,
        "agreement": agreement,
        "execution": execution,
        **scores,
        "latency_ms": latency.compressed.median_ms,
        "latency_low_ms": latency.compressed.low_ms,
        "latency_high_ms": latency.compressed.high_ms,
        "baseline_latency_ms": latency.baseline.median_ms,
        "baseline_latency_low_ms": latency.baseline.low_ms,
        "baseline_latency_high_ms": latency.baseline.high_ms,
        "latency_ratio_low": latency.ratio_low,
        "latency_ratio_high": latency.ratio_high,
        "clock": latency.compressed.clock,
        "busy": latency.busy,
        "runtime": timing["runtime"],
        "batch": timing["batch"],
        "threads": timing["threads"],
        "file_bytes": path.stat().st_size,
        "baseline_file_bytes": baseline.stat().st_size,
        "opset": version,
        "preprocess": inputs.preprocessing is not None,
    }
    return section, latency


def rival_numbers(
    path: Path, measured: Callable[[Path], tuple[dict[str, Any], LatencyComparison]]
) -> dict[str, Any] | None:
    """Measure the dense network in 8-bit integers: the section `dense_int8` of metrics.json."""
    try:
        with logged_seconds(log, "the dense network in 8-bit integers"):
            worth, times = measured(path)
    except (ExportError, NonFiniteError) as error:
        log.warning("the dense network in 8-bit integers is not measured: %s", error)
        return None
    size = path.stat().st_size
    path.unlink()
    return {
        **worth,
        "latency_ratio": times.ratio,
        "latency_ratio_low": times.ratio_low,
        "latency_ratio_high": times.ratio_high,
        "file_bytes": size,
    }


def warn_if_busy(busy: str | None) -> None:
    """Log a warning where times were taken on a busy machine; `busy` is the evidence."""
    if busy is not None:
        log.warning(
            "the machine was busy while latency was measured: %s. Measure again when it is quiet: "
            "with task=export, or overwrite=True in Python",
            busy,
        )
