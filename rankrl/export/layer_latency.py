"""Latencies of single layers at their candidate ranks in onnxruntime, for budgets in time.

All candidates of a layer stand beside its dense form in one graph, which is traced once and cut into one
graph for each; these are timed in turns. Layers of the same geometry and candidates are measured once.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.utils
import onnxruntime
import torch
from torch import Tensor, nn

from decomposition import CandidateSet, DecompositionError, LatencyTable, LayerOperation, inspect_layers
from decomposition.layers import DecomposableModule, LayerSpec, is_decomposable_module
from rankrl.device import processor_name
from rankrl.export.latency import clock_for, measure_latency, ticks
from rankrl.export.onnx_file import export_onnx
from rankrl.export.session import open_session

log = logging.getLogger(__name__)

_WARM_UP = 3
_LARGEST_SHARE = 0.98
"""The layers' part of the network's time, at most: their sum can exceed it, measured one by one."""


def measure_layer_latencies(
    model: nn.Module,
    sites: Sequence[CandidateSet],
    input_shape: Sequence[int],
    *,
    batch: int = 64,
    threads: int = 1,
    runs: int = 15,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> LatencyTable:
    """Measure every candidate of every layer, and the whole dense network.

    Measured alone, a layer pays for conversions of the memory layout that a network makes once; the layers'
    times are therefore scaled so that the dense ones fit into the dense network's time.

    Args:
        model: The dense network.
        sites: The candidates of its layers.
        input_shape: Shape of one input without the batch axis.
        batch: Inputs of a forward pass.
        threads: Threads of onnxruntime.
        runs: Timed passes of each candidate.
        folder: Where tables are kept, one for each machine, model and setting; None keeps none.
        progress: Called with each measured layer's name.

    Returns:
        Milliseconds for one batch.

    Raises:
        ExportError: A layer or the network cannot be exported.
    """
    specs = {spec.name: spec for spec in inspect_layers(model, input_shape)}
    conditions = _conditions(batch, threads)
    path = None if folder is None else folder / f"{_key(sites, specs, conditions, runs)}.json"
    if path is not None and path.exists():
        try:
            return LatencyTable.load(path)
        except DecompositionError:
            log.warning("%s is damaged; latencies are measured anew", path)
    modules = dict(model.named_modules())
    known: dict[str, tuple[float, ...]] = {}
    times: dict[str, tuple[float, ...]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for site in sites:
            module = modules[site.name]
            if not is_decomposable_module(module):
                raise TypeError(f"layer {site.name!r} is a {type(module).__name__}")
            geometry = _geometry(site)
            if geometry not in known:
                known[geometry] = _measure(site, module, Path(scratch), batch, threads, runs)
            times[site.name] = known[geometry]
            if progress is not None:
                progress(site.name)
        dense = Path(scratch) / "network.onnx"
        export_onnx(model, dense, tuple(input_shape))
        whole = measure_latency(dense, batch=batch, threads=threads, runs=2 * runs).median_ms
    table = _fitted(times, whole, conditions)
    if path is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        table.save(path)
    return table


class _Candidates(nn.Module):
    """The dense layer and its candidates side by side, each with an output of its own."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.relu(layer(x)) for layer in self.layers)


def _measure(
    site: CandidateSet, dense: DecomposableModule, folder: Path, batch: int, threads: int, runs: int
) -> tuple[float, ...]:
    """Return the median milliseconds of every candidate, all calls of the layer together."""
    spec = site.spec
    layers: list[nn.Module] = []
    for candidate in site.candidates:
        layer: nn.Module = dense
        for operation in candidate.operations:
            if not isinstance(operation, LayerOperation):
                raise TypeError(f"layer {site.name!r}: {operation.kind!r} cannot be timed alone")
            layer = operation.structure(layer, spec)
        if layer is not dense:
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)
        layers.append(layer)
    times = np.zeros(len(layers))
    for size in spec.input_sizes:
        if spec.kind == "linear":
            count, shape = batch, (*size, spec.in_channels)
        else:  # one image may come as several pieces
            pieces = len(size) - len(spec.kernel_size)
            count, shape = batch * math.prod(size[:pieces]), (spec.in_channels, *size[pieces:])
        path = folder / "layer.onnx"
        sample = torch.zeros(count, *shape)
        export_onnx(_Candidates(layers), path, shape, sample=sample, dynamic_batch=False)
        times += _time_outputs(path, (count, *shape), threads, runs)
    return tuple(times.tolist())


def _time_outputs(path: Path, shape: tuple[int, ...], threads: int, runs: int) -> np.ndarray:
    """Return the median milliseconds of each output of a file, timed in turns."""
    whole = onnx.load(path)
    extractor = onnx.utils.Extractor(whole)
    entry = whole.graph.input[0].name
    sessions = []
    for output in whole.graph.output:
        onnx.save(extractor.extract_model([entry], [output.name]), path)
        sessions.append(open_session(path, threads=threads))
    inputs = {entry: np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}
    read = ticks(clock_for(threads))
    times = np.zeros((runs, len(sessions)))
    for turn in range(-_WARM_UP, runs):
        for position, session in enumerate(sessions):
            start = read()
            session.run(None, inputs)
            if turn >= 0:
                times[turn, position] = (read() - start) / 1e6
    return np.median(times, axis=0)


def _fitted(sites: dict[str, tuple[float, ...]], whole: float, conditions: str) -> LatencyTable:
    """Scale the layers' times so that the dense ones leave something of the network's time for the rest."""
    dense = sum(times[-1] for times in sites.values())
    factor = min(1.0, _LARGEST_SHARE * whole / dense)
    scaled = {name: tuple(factor * time for time in times) for name, times in sites.items()}
    return LatencyTable(scaled, rest=whole - factor * dense, conditions=conditions)


def _conditions(batch: int, threads: int) -> str:
    return (
        f"onnxruntime {onnxruntime.__version__}, batch {batch}, threads {threads}, {processor_name()}, ms of "
        f"{clock_for(threads)} time"
    )


def _geometry(site: CandidateSet) -> str:
    """Return all that a layer's latencies depend on: equal texts, equal times."""
    nameless = replace(site.spec, name="", index=0, batch_norm=None)
    return repr((nameless, [each.operations for each in site.candidates]))


def _key(sites: Sequence[CandidateSet], specs: dict[str, LayerSpec], conditions: str, runs: int) -> str:
    content = [conditions, str(runs), *map(repr, specs.values())]
    content += [f"{site.name} {_geometry(site)}" for site in sites]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:24]
