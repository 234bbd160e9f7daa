"""Time candidates of layers in a runtime between neighbours, as in a network.

A layer timed alone includes conversions that a network makes once: of the memory layout, and from floating
point to integers and back. So each candidate is timed between two small convolutions in its own precision,
and the time of these, with the conversions at the ends, is subtracted:

    time = t(before, layer, after) - (t(before, before) + t(after, after)) / 2

All of these networks of a layer and precision form one graph, which is written and quantised once and cut
into one graph each.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import Candidate, LayerOperation, Quantise, integer_layers, without_rounding
from decomposition.cache import digest
from decomposition.memory import free_memory
from decomposition.network.layers import DecomposableModule, LayerSpec
from decomposition.network.surgery import copied
from decomposition.operations import Operation
from rankrl.kits.kit import Contents, FileGroup, Stopwatch
from rankrl.onnx.export.channel_padding import pad_channels
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.graph_edits import part_of
from rankrl.onnx.protobuf import load_model
from rankrl.options.timing import DEFAULT_RUNTIME
from rankrl.timing.layer_files import SideBySide
from rankrl.timing.local_stopwatch import LocalStopwatch
from rankrl.timing.lone_node import LoneNode

_FEWEST_CHANNELS = 8
"""Layers with fewer inputs read the network's own input, whose memory layout nothing has prepared."""
_MOST_TOGETHER = 48
"""Graphs that are open at the same time: each holds its own tensors. Fewer where they are large, so that all
take no more than half of the memory that is free."""
_COPIES = 6
"""Of a layer's weights: two modules, the file, its parts, and what the runtime makes of it."""


class LayerTimer:
    """Times layers; neighbours are timed once for each shape and precision."""

    def __init__(
        self,
        *,
        batch: int,
        threads: int,
        runs: int,
        runtime: str = DEFAULT_RUNTIME,
        channel_block: int = 1,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.batch, self.runs, self.channel_block = batch, runs, channel_block
        self.stopwatch = LocalStopwatch(threads, runtime) if stopwatch is None else stopwatch
        self._pairs: dict[tuple[tuple[int, ...], bool, bool], float] = {}

    def candidates(
        self, dense: DecomposableModule, spec: LayerSpec, operations: Sequence[Sequence[Operation]]
    ) -> np.ndarray:
        """Return the median milliseconds of a layer under each list of operations, all its calls together."""
        total = np.zeros(len(operations))
        for size, result in zip(spec.input_sizes, spec.output_sizes, strict=True):
            shape, after = self._shapes(spec, size, result)
            for integer in (False, True):  # apart: the quantiser would round an input for all that share it
                mine = [
                    j for j, of_layer in enumerate(operations) if any(o.integer for o in of_layer) == integer
                ]
                if not mine:
                    continue
                together = _most_together(dense, shape, after)
                for part in (mine[start : start + together] for start in range(0, len(mine), together)):
                    layers = [_structure(dense, spec, operations[j]) for j in part]
                    total[part] += self._between(layers, shape, after, integer)
        # A difference of measured times may fall below zero for a very fast layer; it is NaN where a file
        # does not run.
        return np.where(np.isfinite(total), np.maximum(total, 1e-4), np.inf)

    def forms(self, spec: LayerSpec, layers: Sequence[nn.Module]) -> np.ndarray:
        """Return the median milliseconds of a layer's replacements in floating point, all calls together."""
        sizes = zip(spec.input_sizes, spec.output_sizes, strict=True)
        shapes = (self._shapes(spec, size, result) for size, result in sizes)
        times = [self._between(list(map(copied, layers)), *ends, integer=False) for ends in shapes]
        return np.maximum(np.sum(times, axis=0), 1e-4)

    def _between(
        self, layers: Sequence[nn.Module], shape: tuple[int, ...], after: tuple[int, ...], integer: bool
    ) -> np.ndarray:
        """Return the milliseconds of layers between neighbours; their weights are overwritten."""
        ends = [_neighbour(size, integer) for size in (shape, after)]
        stacks = [copied(_stack([ends[0], layer, ends[1]])) for layer in layers]
        around = sum(self._pair(size, integer, integer) for size in (shape, after)) / 2
        with np.errstate(invalid="ignore"):  # where neither runs
            return self._time(stacks, shape) - around

    def node(self, node: LoneNode, candidates: Sequence[Candidate]) -> tuple[float, ...]:
        """Return the median milliseconds of a node of a file under each candidate."""
        operations = [candidate.operations for candidate in candidates]
        return tuple(self.stopwatch.times(node.files(operations, self.runs)).tolist())

    def alone(self, layers: Sequence[nn.Module], shape: tuple[int, ...]) -> np.ndarray:
        """Return the median milliseconds of layers with nothing around them; `shape` is the whole input."""
        return self._time([_stack([layer]) for layer in layers], shape)

    def border(self, spec: LayerSpec) -> float:
        """Return the milliseconds of a change from floating point to integers, or back, behind a layer."""
        total = 0.0
        for size, result in zip(spec.input_sizes, spec.output_sizes, strict=True):
            _, shape = self._shapes(spec, size, result)
            alike = (self._pair(shape, False, False) + self._pair(shape, True, True)) / 2
            mixed = (self._pair(shape, False, True) + self._pair(shape, True, False)) / 2
            total += max(0.0, mixed - alike)
        return total

    def addition(self, spec: LayerSpec, integer: bool) -> float:
        """Return the median milliseconds of adding a layer's outputs to something of their shape."""
        total = 0.0
        for size, result in zip(spec.input_sizes, spec.output_sizes, strict=True):
            _, shape = self._shapes(spec, size, result)
            ends = [_neighbour(shape, integer) for _ in range(2)]
            if ends[0] is not None and ends[1] is not None:
                added = float(self._time([nn.Sequential(_Residual(ends[0]), ends[1])], shape)[0])
                total += max(0.0, added - self._pair(shape, integer, integer))
        return total

    def _shapes(
        self, spec: LayerSpec, size: tuple[int, ...], result: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of input and output, with the batch axis first."""
        if spec.kind == "linear":  # all positions are rows of one matrix, whatever axes they lie on
            rows, behind = self.batch * math.prod(size), self.batch * math.prod(result)
            return (rows, spec.in_channels), (behind, spec.out_channels)
        pieces = len(size) - len(spec.kernel_size)  # one image may come as several pieces
        count = self.batch * math.prod(size[:pieces])
        return (count, spec.in_channels, *size[pieces:]), (count, spec.out_channels, *result[pieces:])

    def _pair(self, shape: tuple[int, ...], first: bool, second: bool) -> float:
        """Return the time of two neighbours in a row, in integers or not; 0 where there are none."""
        key = (shape, first, second)
        if key not in self._pairs:
            pair = [_neighbour(shape, integer) for integer in (first, second)]
            if pair[0] is None:
                self._pairs[key] = 0.0
            else:
                self._pairs[key] = float(self._time([nn.Sequential(*pair)], shape)[0])  # type: ignore[arg-type]
        return self._pairs[key]

    def _time(self, networks: Sequence[nn.Module], shape: tuple[int, ...]) -> np.ndarray:
        """Return the median milliseconds of each network, timed in turns."""
        names = tuple(digest("layers", shape, self.channel_block, str(network)) for network in networks)
        return self.stopwatch.times(FileGroup(names, partial(self._contents, networks, shape), self.runs))

    def _contents(self, networks: Sequence[nn.Module], shape: tuple[int, ...]) -> Contents:
        """Return each network as a graph of its own, and the input of all."""
        network = SideBySide(networks).eval()
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.1)
        weights = {f"{name}.weight" for name in integer_layers(network)}
        without_rounding(network)
        inputs = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layers.onnx"
            network.save(path, shape)
            if weights:
                quantise_onnx(path, path, [inputs], weights=weights, fitted=False)
            whole = load_model(path)
        parts = []
        for output in whole.graph.outputs:
            parts.append(part_of(whole, list(whole.graph.inputs), [str(output.name)]))
            pad_channels(parts[-1], self.channel_block)
        return parts, inputs


def _most_together(dense: DecomposableModule, shape: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the number of graphs that fit into half the free memory together, with weights and tensors."""
    free = free_memory()
    if free is None:
        return _MOST_TOGETHER
    size = 4 * (2 * (math.prod(shape) + math.prod(after)) + _COPIES * dense.weight.numel())
    return max(1, min(_MOST_TOGETHER, free // (2 * size)))


def _stack(layers: Sequence[nn.Module | None]) -> nn.Sequential:
    return nn.Sequential(*(layer for layer in layers if layer is not None))


class _Residual(nn.Module):
    """A layer whose activated output is added to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + x


def _structure(dense: DecomposableModule, spec: LayerSpec, operations: Sequence[Operation]) -> nn.Module:
    layer: nn.Module = dense if operations else copied(dense)
    for operation in operations:
        if not isinstance(operation, LayerOperation):
            raise TypeError(f"layer {spec.name!r}: {operation.kind!r} cannot be timed alone")
        layer = operation.structure(layer, spec)
    return layer


def _neighbour(shape: tuple[int, ...], integer: bool) -> nn.Module | None:
    """Return a convolution that mixes channels; None next to a linear layer or a network's input."""
    channels, spatial = shape[1], len(shape) - 2
    if spatial not in (1, 2) or channels < _FEWEST_CHANNELS:
        return None
    kind = nn.Conv1d if spatial == 1 else nn.Conv2d
    layer = kind(channels, channels, 1)
    if integer:
        Quantise().round(layer)
    return layer
