"""Measure every candidate of every layer between neighbours: the latency table of a budget in time."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from decomposition import (
    Candidate,
    CandidateSet,
    DecompositionError,
    Factorise,
    LatencyTable,
    LayerOperation,
    Quantise,
    integer_layers,
    without_rounding,
)
from decomposition.cache import digest
from decomposition.formats.layers import FactorisedLayer, plain_layers
from decomposition.memory import release_memory, room
from decomposition.network.geometry import Geometry
from decomposition.network.layers import DecomposableModule, LayerSpec, is_decomposable_module
from decomposition.network.surgery import copied
from decomposition.operations import Operation
from rankrl.kits.kit import Contents, FileGroup, Stopwatch
from rankrl.onnx.export.graph_passes import pad_channels
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.onnx_file import OLDEST_OPSET, export_onnx
from rankrl.onnx.graph.calibration import Captured
from rankrl.onnx.graph.compressed import quantise_lstms
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import add_constant, depending, node_of, part_of, set_types
from rankrl.onnx.protobuf import load_model, save_model
from rankrl.options.timing import DEFAULT_RUNTIME
from rankrl.timing.latency import LocalStopwatch


class SideBySide(nn.Module):
    """Networks side by side, each with an output of its own; behind every layer is a ReLU."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of every network on one input."""
        outputs = []
        for network in self.networks:
            y = x
            for layer in network.children():
                y = torch.relu(layer(y))
            outputs.append(y)
        return tuple(outputs)

    def save(self, path: Path, shape: tuple[int, ...]) -> None:
        """Write the networks as one ONNX file; weights are called as in the module."""
        if all(map(_in_a_row, self.modules())):
            save_model(self._model(shape), path)
        else:
            sample = torch.zeros(shape)
            export_onnx(self, path, shape[1:], sample=sample, dynamic_batch=False, progress=False)

    def _model(self, shape: tuple[int, ...]) -> ir.Model:
        x = ir.val("input", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph = ir.Graph([x], [], nodes=[], name="layers", opset_imports={"": OLDEST_OPSET})
        names = {module: name for name, module in self.named_modules()}
        for network, module in self.networks.named_children():
            y = x
            for layer in module.children():
                for part, stage in plain_layers(layer).items():
                    y = _append(graph, y, stage, ".".join(filter(None, (names[layer], part))))
                relu = node_of("Relu", [y], f"{names[layer]}.relu")
                graph.append(relu)
                y = relu.outputs[0]
            y.name, y.type = f"output_{network}", x.type
            with torch.no_grad():
                y.shape = ir.Shape(module(torch.zeros(shape)).shape)
            graph.outputs.append(y)
        return ir.Model(graph, ir_version=onnx.IR_VERSION_2023_5_5)


def _in_a_row(module: nn.Module) -> bool:
    """Tell whether a module's layers are one behind the other, each a convolution or matrix product."""
    if isinstance(module, FactorisedLayer):
        return module.execution != "dense" and bool(module.plain_layers())
    return isinstance(module, SideBySide | nn.ModuleList | nn.Sequential) or is_decomposable_module(module)


def _append(graph: ir.Graph, x: ir.Value, stage: DecomposableModule, name: str) -> ir.Value:
    """Add the node of a convolution or matrix product; return its output."""
    inputs, attributes = [x, add_constant(graph, f"{name}.weight", _array(stage.weight))], dict[str, Any]()
    if stage.bias is not None:
        inputs.append(add_constant(graph, f"{name}.bias", _array(stage.bias)))
    op_type = "Gemm"
    if isinstance(stage, nn.Linear):
        attributes = {"transB": 1}
    else:
        op_type = "Conv"
        attributes = {
            "kernel_shape": list(stage.kernel_size),
            "strides": list(stage.stride),
            "dilations": list(stage.dilation),
            "group": stage.groups,
            "pads": 2 * list(stage.padding),
        }
    node = node_of(op_type, inputs, name, attributes)
    graph.append(node)
    return node.outputs[0]


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


@dataclass(frozen=True, eq=False)
class LoneNode:
    """An LSTM of a network in an ONNX file."""

    network: OnnxNetwork
    site: Site
    feed: Feed

    def files(self, operations: Sequence[Sequence[Operation]], runs: int) -> FileGroup:
        """Return the node under each list of operations, to be timed."""
        spec = replace(self.site.spec, name="", index=0)
        names = [digest("node", self.network.axes.size(self.feed), spec, each) for each in operations]
        return FileGroup(tuple(names), partial(self._contents, operations), runs)

    def _contents(self, operations: Sequence[Sequence[Operation]]) -> Contents:
        part, values = self._part()
        models = []
        for each in operations:
            model = part.clone()
            bits = [one.weight_bits for one in each if isinstance(one, Quantise)]
            quantise_lstms(model, [(self.site, number) for number in bits])
            models.append(model)
        return models, values

    def _part(self) -> tuple[ir.Model, Feed]:
        """Return the node as a graph of its own, and its inputs."""
        model = self.network.graph_model()
        node = next(node for node in model.graph if node.name == self.site.name)
        variable = depending(model.graph, model.graph.inputs)
        ends = [str(value.name) for value in node.inputs if value in variable]
        values = Captured(model, ends, self.network.source).run(self.feed)
        part = part_of(model, ends, [str(output.name) for output in node.outputs if output.name])
        set_types(part, values)
        return part, values


_FEWEST_CHANNELS = 8
"""Layers with fewer inputs read the network's own input, whose memory layout nothing has prepared."""
_MOST_TOGETHER = 48
_TOGETHER = 2**27
"""Graphs that are made at the same time, and their bytes: each holds its own tensors."""
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
        """Return the milliseconds of a layer under each list of operations, all its calls together."""
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
        """Return the milliseconds of a layer's replacements in floating point, all calls together."""
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
        """Return the milliseconds of a node of a file under each candidate."""
        operations = [candidate.operations for candidate in candidates]
        return tuple(self.stopwatch.times(node.files(operations, self.runs)).tolist())

    def alone(self, layers: Sequence[nn.Module], shape: tuple[int, ...]) -> np.ndarray:
        """Return the milliseconds of layers with nothing around them; `shape` is the whole input."""
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
        """Return the milliseconds of adding a layer's outputs to something of their shape."""
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
        """Return the milliseconds of each network, timed in turns."""
        names = tuple(digest("layers", shape, self.channel_block, str(network)) for network in networks)
        times = self.stopwatch.times(FileGroup(names, partial(self._contents, networks, shape), self.runs))
        release_memory()
        return times

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
    """Return the number of graphs that are made together, by their weights and largest values."""
    size = 4 * (2 * (math.prod(shape) + math.prod(after)) + _COPIES * dense.weight.numel())
    left = room()
    return max(1, min(_MOST_TOGETHER, (_TOGETHER if left is None else min(left, _TOGETHER)) // size))


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


_LARGEST_SHARE = 0.98
"""At most this part of the network's time is the layers': their sum can exceed it, measured one by one."""
_LEAST_SHARE = 0.5
"""At least this part of the time of the network in integers is the layers'."""

_NOTHING = 1e-4
"""Milliseconds of a layer that leaves the network: a table holds positive times."""

_Rows = tuple[tuple[float, ...], ...]
_NO_ROWS: _Rows = ()
_SiteTimes = tuple[tuple[float, ...], _Rows]
"""Times of a site's candidates, and of each at every number of outputs that the next site may read."""


@dataclass(frozen=True)
class SiteTimes:
    """Times of sites on their own, in milliseconds."""

    times: dict[str, tuple[float, ...]]
    narrowed: dict[str, _Rows]
    borders: dict[str, float]

    def table(
        self,
        sites: Sequence[CandidateSet],
        whole: float,
        in_integers: float | None = None,
        conditions: str = "",
    ) -> LatencyTable:
        """Return the table in which the dense layers and a rest add up to the time of the dense network."""
        for name, time in (("the dense network", whole), *((k, v[-1]) for k, v in self.times.items())):
            if not np.isfinite(time):
                raise DecompositionError(
                    f"{name} does not run where it was timed ({conditions}), so that nothing can be compared "
                    "with it; the reason stands under `failed` in the table"
                )
        dense = sum(times[-1] for times in self.times.values())
        factor = min(1.0, _LARGEST_SHARE * whole / dense)
        rest, integer_factor = whole - factor * dense, 1.0
        if in_integers is not None and np.isfinite(in_integers):
            # Layers without integers have the same time in both networks.
            integers = {site.name: self._in_integers(site) for site in sites}
            quantised = sum(map(sum, integers.values()))
            floats = factor * sum(self.times[name][-1] for name, own in integers.items() if not own)
            left = in_integers - floats
            if quantised > 0:
                integer_factor = max(left - rest, _LEAST_SHARE * left) / quantised if left > 0 else factor
        factors = {
            site.name: [integer_factor if each.computes_integers else factor for each in site.candidates]
            for site in sites
        }
        scaled = {
            name: tuple(time * scale for time, scale in zip(self.times[name], own, strict=True))
            for name, own in factors.items()
        }
        narrower = {
            name: tuple(
                tuple(time * scale for time in row) for row, scale in zip(rows, factors[name], strict=True)
            )
            for name, rows in self.narrowed.items()
        }
        return LatencyTable(scaled, rest=rest, conditions=conditions, borders=self.borders, narrowed=narrower)

    def _in_integers(self, site: CandidateSet) -> list[float]:
        """Return the times of the dense layer in integers, where it has them and they run."""
        times = zip(site.candidates, self.times[site.name], strict=True)
        return [time for candidate, time in times if candidate.only_integers and np.isfinite(time)]


def time_sites(
    timer: LayerTimer,
    modules: Mapping[str, nn.Module | LoneNode],
    sites: Sequence[CandidateSet],
    progress: Callable[[str], None] | None = None,
) -> SiteTimes:
    """Measure every candidate of every site."""
    alike: dict[str, list[CandidateSet]] = {}
    for site in sites:
        alike.setdefault(geometry(site), []).append(site)
    times: dict[str, tuple[float, ...]] = {}
    narrowed: dict[str, _Rows] = {}
    borders: dict[str, float] = {}
    integers = any(candidate.integer for site in sites for candidate in site.candidates)
    for group in alike.values():
        together = _together(group)
        module = modules[together.name]
        border, rows = 0.0, _NO_ROWS
        if isinstance(module, LoneNode):
            measured = timer.node(module, together.candidates)
        elif is_decomposable_module(module):
            border = timer.border(together.spec) if integers else 0.0
            measured, rows = _site_times(timer, module, together)
        else:
            raise TypeError(f"layer {together.name!r} is a {type(module).__name__}")
        known = {_identity(candidate): index for index, candidate in enumerate(together.candidates)}
        additions: dict[bool, float] = {}
        if any(map(_adds, group)):
            additions = {integer: timer.addition(together.spec, integer) for integer in {False, integers}}
        for site in group:
            mine = [known.get(_identity(candidate)) for candidate in site.candidates]
            # The output of a block's last layer is added to the block's input.
            added = additions if _adds(site) else {}
            times[site.name] = tuple(
                _NOTHING if index is None else measured[index] + added.get(candidate.integer, 0.0)
                for index, candidate in zip(mine, site.candidates, strict=True)
            )
            borders[site.name] = border
            if site.narrows:
                nothing = (_NOTHING,) * len(rows[-1])
                narrowed[site.name] = tuple(nothing if index is None else rows[index] for index in mine)
            if progress is not None:
                progress(site.name)
    return SiteTimes(times, narrowed, borders if integers else {})


def _together(sites: Sequence[CandidateSet]) -> CandidateSet:
    """Return the candidates of layers of one geometry in one set, without repetitions."""
    staying = (candidate for site in sites for candidate in site.candidates[:-1] if candidate.removed is None)
    distinct = {_identity(candidate): candidate for candidate in staying}
    return replace(sites[0], candidates=(*distinct.values(), sites[0].candidates[-1]))


def _identity(candidate: Candidate) -> str:
    """Return the key of a candidate's time; of the channels that it reads only their number counts."""
    return repr((candidate.inputs, [operation.to_dict() for operation in candidate.operations]))


def _site_times(timer: LayerTimer, module: DecomposableModule, site: CandidateSet) -> _SiteTimes:
    """Return the time of every candidate, and at every number of outputs that the next site may read.

    The latter is measured for dense layers; factorised ones are assumed to save nothing, an upper bound.
    """
    groups: dict[int, list[int]] = {}
    for index, candidate in enumerate(site.candidates):
        inputs = site.spec.in_channels if candidate.inputs is None else candidate.inputs
        groups.setdefault(inputs, []).append(index)

    def measured(indices: list[int], inputs: int, outputs: int) -> np.ndarray:
        layer = replace(Geometry.of(module), in_channels=inputs, out_channels=outputs).dense()
        operations = [site.candidates[index].operations for index in indices]
        return timer.candidates(layer, site.spec.narrowed(inputs=inputs, outputs=outputs), operations)

    times = np.zeros(len(site))
    for inputs, indices in groups.items():
        times[indices] = measured(indices, inputs, site.spec.out_channels)
    numbers = [fewer.rows for fewer in site.candidates[site.dense].narrower if fewer is not None]
    narrowed = np.repeat(times[:, None], len(numbers), axis=1)
    for column, outputs in enumerate(numbers):
        for inputs, indices in groups.items():
            dense = [index for index in indices if not _factorised(site.candidates[index])]
            if dense:
                narrowed[dense, column] = measured(dense, inputs, outputs)
    return tuple(times.tolist()), tuple(map(tuple, narrowed.tolist()))


def _adds(site: CandidateSet) -> bool:
    """Tell whether a block adds the site's output to its input, an addition that goes with the site."""
    return any(candidate.removed is not None and candidate.error > 0 for candidate in site.candidates)


def _factorised(candidate: Candidate) -> bool:
    return any(isinstance(operation, Factorise) for operation in candidate.operations)


def geometry(site: CandidateSet) -> str:
    """Return the key of a layer's latencies besides its operations: its geometry."""
    nameless = replace(site.spec, name="", index=0, batch_norm=None)
    return repr((nameless, [fewer and fewer.rows for fewer in site.candidates[site.dense].narrower]))
