"""Compute the peak memory of a graph's activations, and leave out candidates that exceed a limit of it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from decomposition import CandidateSet, DecompositionError, Factorise, LayerSpec
from decomposition.choose.candidates import Candidate
from decomposition.network.cost import stage_sizes
from decomposition.network.geometry import Geometry
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.static_quantiser import tensors_of
from rankrl.onnx.graph.sites import constant_name
from rankrl.onnx.graph_edits import Array, bodies_of, depending, dequantises, is_standard, quantises, used_by
from rankrl.onnx.protobuf import load_model, save_model, to_proto
from rankrl.onnx.runtimes import Batch


@dataclass(frozen=True)
class _Place:
    """Bytes around a node: its input, its output, the rest that is live; whether the input is used later."""

    source: float
    output: float
    rest: float
    kept: bool


class Activations:
    """The activations of a graph on one input, each live from the node that computes it to its last use.

    Nodes are executed in the order of the file, and none overwrites its input. Constants, and what is
    computed from constants alone, do not count. Between nodes that compute in integers, activations are the
    integers that QuantizeLinear gives. The peak of a body (of If, Loop) is added where its node stands, with
    1 for sizes that are not known there.
    """

    def __init__(self, model: ir.Model, feed: Batch) -> None:
        graph = _inferred(model, feed).graph
        self._graph = graph
        self.nodes = [str(node.name) for node in graph]
        self._steps = {node: step for step, node in enumerate(graph)}
        counted = depending(graph, graph.inputs)
        self._stands = _fused(graph, counted)
        self._first: dict[ir.Value, int] = {}
        self._last: dict[ir.Value, int] = {}
        end = len(self.nodes) - 1
        for value in graph.inputs:
            self._use(value, 0, counted)
        for node, step in self._steps.items():
            for value in (*used_by(node, graph), *node.outputs):
                self._use(value, step, counted)
        for value in graph.outputs:
            self._use(value, end, counted)
        self.live = np.zeros(len(self.nodes), dtype=np.int64)
        for value, first in self._first.items():
            self.live[first : self._last[value] + 1] += _bytes(value)
        for node, step in self._steps.items():
            self.live[step] += max(map(_peak_of_body, bodies_of(node)), default=0)

    def _use(self, value: ir.Value, step: int, counted: Collection[ir.Value]) -> None:
        if value in counted:
            value = self._stand(value)
            self._first.setdefault(value, step)
            self._last[value] = max(step, self._last.get(value, step))

    def _stand(self, value: ir.Value) -> ir.Value:
        while value in self._stands:
            value = self._stands[value]
        return value

    @property
    def peak(self) -> int:
        """Bytes that are live at once, at most."""
        return int(self.live.max(initial=0))

    def place(self, name: str) -> _Place:
        """Return the bytes around a node that reads one activation first and writes one."""
        node = next(node for node in self._steps if node.name == name)
        step = self._steps[node]
        assert node.inputs[0] is not None
        source, output = self._stand(node.inputs[0]), self._stand(node.outputs[0])
        rest = int(self.live[step]) - _bytes(source) - _bytes(output)
        return _Place(_bytes(source), _bytes(output), rest, self._last.get(source, step) > step)

    def touching(self, step: int) -> set[str]:
        """Return the names of the nodes that read or write an activation that is live at a step."""
        values = {value for value, first in self._first.items() if first <= step <= self._last[value]}
        return {
            str(node.name)
            for node in self._steps
            if any(self._stand(value) in values for value in (*used_by(node, self._graph), *node.outputs))
        }


def activation_bytes(path: Path, feed: Batch) -> int:
    return Activations(load_model(path), feed).peak


def one_input(batch: Batch) -> Batch:
    """Return the first input of a batch whose arrays all count inputs along their first axis."""
    if isinstance(batch, Mapping):
        return {name: array[:1] for name, array in batch.items()}
    return batch[:1]


def _inferred(model: ir.Model, feed: Batch) -> ir.Model:
    """Return a graph with the shapes of all values, inferred where that is possible, else from a run."""
    proto = to_proto(model)
    names = [str(value.name) for value in model.graph.inputs]
    arrays = feed if isinstance(feed, Mapping) else {names[0]: feed}
    if not set(names) <= set(arrays):  # a finished file may have names of its own
        arrays = dict(zip(names, arrays.values(), strict=True))
    feeds: dict[str, Array] = {
        str(value.name): arrays[str(value.name)].astype(value.dtype.numpy())
        for value in model.graph.inputs
        if value.dtype is not None
    }
    for entry in proto.graph.input:
        del entry.type.tensor_type.shape.dim[:]
        for size in feeds[entry.name].shape:
            entry.type.tensor_type.shape.dim.add().dim_value = size
    del proto.graph.value_info[:]
    for entry in proto.graph.output:
        if entry.type.HasField("tensor_type"):
            entry.type.tensor_type.ClearField("shape")
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    counted = depending(graph.graph, graph.graph.inputs)
    outputs = [value for node in graph.graph for value in node.outputs if value in counted and value.name]
    unknown = [value for value in outputs if value.shape is None or not value.shape.is_static()]
    if unknown:
        seen = tensors_of(proto, [str(value.name) for value in unknown])(feeds)
        for value in unknown:
            array = seen[str(value.name)]
            if isinstance(value.type, ir.TensorType | None):  # else a sequence, which has no shape
                value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
    return graph


def _bytes(value: ir.Value) -> int:
    """Return the bytes of a tensor; sizes that are not known count as 1."""
    if value.dtype is None or value.dtype is ir.DataType.STRING:
        return 0
    sizes = [size if isinstance(size, int) else 1 for size in value.shape or ()]
    return -(-int(np.prod(sizes, dtype=np.int64)) * value.dtype.bitwidth // 8)


def _fused(graph: ir.Graph, counted: Collection[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return the integers that stand for floating-point values between nodes that compute in integers."""
    computing = {node for node in graph if _computes_integers(node, counted)}
    stands = {}
    for node in graph:
        value = node.outputs[0]
        readers = [use.node for use in value.uses()]
        if node in computing:
            stands[value] = readers[0].outputs[0]
        elif dequantises(node) and readers and not value.is_graph_output() and computing.issuperset(readers):
            assert node.inputs[0] is not None
            stands[value] = node.inputs[0]
    return stands


def _computes_integers(node: ir.Node, counted: Collection[ir.Value]) -> bool:
    """Tell whether a node is computed in integers: it stands between DequantizeLinear and QuantizeLinear."""
    if quantises(node) or dequantises(node) or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return False
    sources = [value.producer() for value in node.inputs if value is not None and value in counted]
    readers = [use.node for use in node.outputs[0].uses()]
    between = sources and all(source is not None and dequantises(source) for source in sources)
    return bool(between and readers) and all(map(quantises, readers))


def _peak_of_body(graph: ir.Graph) -> int:
    """Return the peak memory of what a body computes and takes itself."""
    first = dict.fromkeys(graph.inputs, 0)
    last, inner = dict(first), dict[int, int]()
    for step, node in enumerate(graph):
        inner[step] = max(map(_peak_of_body, bodies_of(node)), default=0)
        if is_standard(node, "Constant"):
            continue
        for value in node.outputs:
            first[value] = step
        for value in (*used_by(node, graph), *node.outputs):
            if value in first:
                last[value] = step
    last |= {value: len(graph) - 1 for value in graph.outputs if value in first}
    live = [sum(_bytes(v) for v in first if first[v] <= step <= last[v]) for step in range(len(graph))]
    return max((bytes + inner[step] for step, bytes in enumerate(live)), default=0)


@dataclass(frozen=True)
class DenseGraph:
    """A network before compression as a graph, with one input and the name of every layer's weight."""

    model: ir.Model
    feed: Batch
    weights: Mapping[str, str]

    @cached_property
    def activations(self) -> Activations:
        return Activations(self.model, self.feed)

    @cached_property
    def _nodes(self) -> dict[str, list[str]]:
        """Names of the nodes that multiply with each layer's weight."""
        layers = {weight: layer for layer, weight in self.weights.items()}
        found: dict[str, list[str]] = {}
        for node in self.model.graph:
            for value in (value for value in node.inputs[1:] if value is not None):
                layer = layers.get(str(value.name)) or layers.get(constant_name(value))
                if layer is not None and len(node.outputs) == 1:
                    found.setdefault(layer, []).append(str(node.name))
        return found

    def within(self, sites: Sequence[CandidateSet], fraction: float) -> list[CandidateSet]:
        """Return the sites without candidates with which a layer exceeds a fraction of the peak.

        Layers compute in integers alone where that is needed. Stages of a layer that is factorised follow one
        another, and their intermediates count; neighbours are taken to stay as large as they are.

        Raises:
            DecompositionError: If no candidates keep the limit.
        """
        limit = fraction * self.activations.peak
        activations, integers = self._in_integers(sites, limit)
        placed = {node: site.name for site in sites for node in self._nodes.get(site.name, ())}
        least = {site.name: 0.0 for site in sites}
        kept = []
        for site in sites:
            nodes = self._nodes.get(site.name, ())
            places = [activations.place(node) for node in nodes if node in activations.nodes]
            allowed = [each.computes_integers or site.name not in integers for each in site.candidates]
            peaks = [
                max((_peak(place, site.spec, each) for place in places), default=0.0)
                for each in site.candidates
            ]
            least[site.name] = min(peak for peak, may in zip(peaks, allowed, strict=True) if may)
            kept.append(
                _kept(site, [may and peak <= limit for may, peak in zip(allowed, peaks, strict=True)])
            )
        needed = [
            least[placed[node]] if node in placed else float(live)
            for node, live in zip(activations.nodes, activations.live, strict=True)
        ]
        worst = int(np.argmax(needed))
        if needed[worst] > limit:
            raise self._unreachable(fraction, needed[worst], activations.nodes[worst], placed)
        return kept

    def _in_integers(self, sites: Sequence[CandidateSet], limit: float) -> tuple[Activations, set[str]]:
        """Find layers that must compute in integers for a limit; return the activations with them so."""
        able = {site.name for site in sites if any(each.computes_integers for each in site.candidates)}
        layers = {node: name for name in able for node in self._nodes.get(name, ())}
        activations, chosen = self.activations, set[str]()
        while (over := np.flatnonzero(activations.live > limit)).size and chosen != able:
            touching = set[str]().union(*(activations.touching(int(step)) for step in over))
            further = {layers[node] for node in touching & set(layers)} - chosen
            chosen |= further or able
            activations = self._rounded(chosen)
        return activations, chosen

    def _rounded(self, layers: Collection[str]) -> Activations:
        with tempfile.TemporaryDirectory() as folder:
            plain, rounded = Path(folder) / "plain.onnx", Path(folder) / "rounded.onnx"
            save_model(self.model, plain)
            weights = {self.weights[name] for name in layers}
            quantise_onnx(plain, rounded, [self.feed], weights=weights, fitted=False)
            return Activations(load_model(rounded), self.feed)

    def _unreachable(
        self, fraction: float, least: float, node: str, placed: Mapping[str, str]
    ) -> DecompositionError:
        share, layer = least / self.activations.peak, placed.get(node)
        where = f"the node {node!r}, which no plan changes," if layer is None else f"the layer {layer!r}"
        return DecompositionError(
            f"budget.memory={fraction} cannot be reached: {where} needs {least:,.0f} of the original's "
            f"{self.activations.peak:,} bytes of activations at least. The least is "
            f"{np.ceil(share * 1e4) / 1e4:.4f}; integers (decomposition.precisions=[float32,int8]) or "
            "smaller inputs need less"
        )


def _kept(site: CandidateSet, keeps: Sequence[bool]) -> CandidateSet:
    """Return the candidates that keep a limit; the dense one stays in the list, marked if it does not."""
    chosen = [index for index, kept in enumerate(keeps[:-1]) if kept]
    return replace(site.subset([*chosen, site.dense]), must_change=not keeps[-1])


def _peak(place: _Place, spec: LayerSpec, candidate: Candidate) -> float:
    """Return the bytes that are live at once while a layer is computed as a candidate has it."""
    stages = _stages(spec, candidate)
    sizes = [place.source, *(place.output * share for share in stages), place.output]
    return max(
        place.rest + before + after + (place.source if place.kept and number else 0)
        for number, (before, after) in enumerate(pairwise(sizes))
    )


def _stages(spec: LayerSpec, candidate: Candidate) -> list[float]:
    """Return the sizes of the tensors between a candidate's stages, as shares of the layer's output."""
    factorise = next((each for each in candidate.operations if isinstance(each, Factorise)), None)
    if factorise is None or not spec.input_sizes:
        return []
    axes = len(spec.kernel_size)
    inside, outside = spec.input_sizes[0], spec.output_sizes[0]
    if axes:
        inside, outside = inside[-axes:], outside[-axes:]
    sliding = zip(inside, outside, spec.kernel_size, spec.stride, strict=True) if axes else ()
    padding = [max(0, -(-((out - 1) * stride + kernel - size) // 2)) for size, out, kernel, stride in sliding]
    geometry = Geometry(
        spec.out_channels,
        spec.in_channels,
        spec.kernel_size,
        spec.stride,
        tuple(padding),
        (1,) * axes,
        bias=spec.bias,
    )
    layer = factorise.structure(geometry.dense(device="meta"), spec).eval()  # training may contract it
    shape = (1, spec.in_channels, *inside) if axes else (1, *inside, spec.in_channels)
    sizes = stage_sizes(layer, torch.empty(shape, device="meta"))
    return [size / sizes[-1] for size in sizes[:-1]]
