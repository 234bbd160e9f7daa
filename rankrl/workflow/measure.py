"""The numbers that a run reports; the only place that reads test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    FactorisedLayer,
    LayerPlan,
    LayerSpec,
    contracted,
    count_macs,
    count_parameters,
    factorised_layers,
)
from rankrl.data import ImageData, batches
from rankrl.device import select_device
from rankrl.export import compare_latency, export_onnx, onnx_accuracy, verify_onnx
from rankrl.report import LayerRow
from rankrl.training import report_accuracy

ONNX_TEST_BATCH = 500


@dataclass(frozen=True)
class ExportOptions:
    """The ONNX file and how its latency is measured.

    Attributes:
        opset: ONNX operator set; None for the exporter's default.
        batch: Images a timed batch.
        threads: Threads of onnxruntime.
        runs: Timed runs of each network.
    """

    opset: int | None = None
    batch: int = 64
    threads: int = 1
    runs: int = 30


def network_numbers(network: nn.Module, data: ImageData) -> dict[str, Any]:
    """Return test accuracy, parameters and multiply-accumulates of a network."""
    return {
        "accuracy": test_accuracy(network, data),
        "params": count_parameters(network),
        "macs": count_macs(network, data.input_shape),
    }


def cost_ratios(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return original ÷ compressed parameters and multiply-accumulates, from two `network_numbers`."""
    return {measure: before[measure] / after[measure] for measure in ("params", "macs")}


def test_accuracy(network: nn.Module, data: ImageData) -> float:
    """Return the accuracy on the test set in float32; the network goes back to the CPU."""
    device = select_device()
    try:
        return report_accuracy(network.to(device), data.test, mean=data.mean, std=data.std)
    finally:
        network.to("cpu")


def export_dense(dense: nn.Module, data: ImageData, folder: Path, options: ExportOptions) -> Path:
    """Export the dense network, for `export_numbers`, and return the file.

    Done before a search, it refuses a network that no file could be written of before anything takes time.

    Raises:
        ExportError: It cannot be exported; the layer is named.
    """
    return export_onnx(dense, folder / "dense.onnx", data.input_shape, opset=options.opset).path


def export_numbers(
    network: nn.Module,
    baseline: Path,
    data: ImageData,
    path: Path,
    options: ExportOptions,
    *,
    metadata: Mapping[str, str],
    scratch: Path,
) -> tuple[dict[str, Any], float]:
    """Export a network, verify the file on real images, and time it beside the dense network.

    Args:
        network: The network to export.
        baseline: ONNX file of the dense network it came from.
        data: The dataset.
        path: The ONNX file to write.
        options: Opset and timing.
        metadata: Text to store in the file.
        scratch: Folder for files that are needed for timing only.

    Returns:
        The section `onnx` of metrics.json, and the latency ratio dense / compressed.
    """
    timing = {"batch": options.batch, "threads": options.threads, "runs": options.runs}
    fastest, execution = _faster_form(network, data, scratch, options.opset, timing)
    written = export_onnx(fastest, path, data.input_shape, opset=options.opset, metadata=metadata)
    images = data.heldout.subset(torch.arange(min(64, len(data.heldout))))
    inputs = next(iter(batches(images, len(images), mean=data.mean, std=data.std)))[0]
    difference = verify_onnx(network, path, inputs)
    test = batches(data.test.for_report(), ONNX_TEST_BATCH, mean=data.mean, std=data.std)
    accuracy = onnx_accuracy(path, test)
    latency = compare_latency(baseline, path, **timing)
    section = {
        "max_abs_difference": difference,
        "execution": execution,
        "accuracy": accuracy,
        "latency_ms": latency.compressed.median_ms,
        "latency_low_ms": latency.compressed.low_ms,
        "latency_high_ms": latency.compressed.high_ms,
        "baseline_latency_ms": latency.baseline.median_ms,
        "baseline_latency_low_ms": latency.baseline.low_ms,
        "baseline_latency_high_ms": latency.baseline.high_ms,
        "batch": options.batch,
        "threads": options.threads,
        "file_bytes": written.file_bytes,
        "opset": written.opset,
    }
    return section, latency.ratio


def _faster_form(
    network: nn.Module, data: ImageData, scratch: Path, opset: int | None, timing: Mapping[str, int]
) -> tuple[nn.Module, str]:
    """Return the form of a compressed network that is faster in onnxruntime, and its name.

    Fewer multiply-accumulates are not always fewer milliseconds: `staged` runs the cores as layers,
    `contracted` contracts them to dense weights once, when the file is loaded. Both hold the same cores.
    """
    if not factorised_layers(network):
        return network, "dense"
    forms = {"staged": network, "contracted": contracted(network)}
    for name, form in forms.items():
        export_onnx(form, scratch / f"{name}.onnx", data.input_shape, opset=opset)
    times = compare_latency(scratch / "staged.onnx", scratch / "contracted.onnx", **timing)
    chosen = "contracted" if times.ratio > 1 else "staged"
    return forms[chosen], chosen


def layer_rows(
    plan: CompressionPlan,
    specs: Sequence[LayerSpec],
    network: nn.Module | None = None,
    *,
    remaining: Sequence[LayerSpec] | None = None,
) -> list[LayerRow]:
    """Return the report's row of every layer, with the fit's error as the compressed `network` records it.

    A plan with kept channels needs the `remaining` layers: those of the network after their removal.
    """
    pruned = {} if remaining is None else {spec.name: spec for spec in remaining}
    fitted = {} if network is None else factorised_layers(network)
    by_name = {spec.name: spec for spec in specs}
    pruning = bool(plan.group_kinds)
    rows = []
    for layer in plan:
        spec = by_name[layer.name]
        rest = pruned.get(layer.name, spec)
        module = fitted.get(layer.name)
        chosen, cost = layer.operation(Factorise), layer.cost(rest)
        rows.append(
            LayerRow(
                name=layer.name,
                shape=spec.weight_shape,
                ranks=() if chosen is None else chosen.ranks,
                params_before=spec.params,
                params_after=cost.params,
                macs_before=spec.macs,
                macs_after=cost.macs,
                error=_error(layer, module, pruning=pruning),
                reason=layer.reason or "",
                channels=(rest.out_channels, spec.out_channels) if pruning else None,
            )
        )
    return rows


def _error(layer: LayerPlan, module: FactorisedLayer | None, *, pruning: bool) -> float | None:
    """Return the relative error of a layer's fit, 0 for a dense one; a removal of channels has none."""
    if not layer.layer_operations:
        return None if pruning else 0.0
    return None if module is None else module.error
