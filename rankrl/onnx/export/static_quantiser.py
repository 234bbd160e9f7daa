"""Collect and choose the ranges of activations in integers, and decide whether weights get 7 or 8 bits."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import add_infer_metadata
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
from torch import nn

from decomposition import Inputs, calibrate_ranges, integer_layers, rounded_parameters
from decomposition.network.rounding import REDUCED_BITS, reduce_weight_range
from decomposition.network.surgery import copied
from rankrl.onnx.graph_edits import (
    add_constant,
    dequantises,
    free_ends,
    is_standard,
    node_of,
    part_of,
    quantises,
    stored,
    without_unused,
)
from rankrl.onnx.protobuf import to_proto
from rankrl.onnx.runtimes import inference_session

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
Cut = Callable[[Feed, int], Iterable[Feed]]
"""Cuts a batch into smaller ones of so many inputs."""
Range = tuple[np.float32, np.float32]

_BINS = 4096
"""Parts into which the numbers on either side of zero are sorted; at least half of them are in use."""
_COUNTED = 2**16
"""Numbers that are counted of a tensor at a time, at least."""
_STEPS = 255  # between the ends of a uint8 range
_SHARES = np.linspace(0.1, 1.0, 46)
"""Of the ends of a range that are tried, both alike; each end is then moved by itself."""
_MOVES = np.linspace(0.5, 1.5, 41)
_SMALLEST = 1e-30
"""The least that a tensor of zeros is taken to reach to."""

_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)


@dataclass
class Spread:
    """Range and histogram of a tensor on calibration inputs."""

    lowest: np.float32 = _HIGHEST
    highest: np.float32 = _LOWEST
    counts: Array | None = None
    width: float = 0.0

    def add(self, values: Array, *, counted: bool = True) -> None:
        """Update the range and, if `counted`, the histogram, with a subsample of a large array."""
        if not values.size:
            return
        lowest, highest = values.min(), values.max()
        finite = np.isfinite(highest - lowest)
        if not finite:
            lowest, highest = np.nanmin(values), np.nanmax(values)
        self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
        if counted and finite:
            step = values.size // _COUNTED | 1  # odd, so that it goes through all columns of an image
            self._count(values.reshape(-1)[::step], float(max(-lowest, highest)))

    def _count(self, values: Array, peak: float) -> None:
        needed = 2.0 ** (np.floor(np.log2(max(peak, _SMALLEST) / _BINS)) + 1)
        if self.counts is None:
            self.counts, self.width = np.zeros(2 * _BINS, np.int64), needed
        while self.width < needed:
            joined = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.pad(joined, _BINS // 2)
            self.width *= 2
        parts = (values * np.float32(1 / self.width) + np.float32(_BINS)).astype(np.int32)
        self.counts += np.bincount(parts.clip(0, 2 * _BINS - 1), minlength=2 * _BINS)

    @property
    def _edges(self) -> Array:
        return np.arange(-_BINS, _BINS + 1) * self.width

    @property
    def ends(self) -> Range:
        """The smallest and the largest number; zeros where there were none."""
        return (self.lowest, self.highest) if self.lowest <= self.highest else (np.float32(0), np.float32(0))

    def percentile(self, share: float) -> Range:
        """Return the range without a share of the smallest and a share of the largest numbers."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        below = np.cumsum(self.counts) / self.counts.sum()
        first, last = np.searchsorted(below, (share, 1 - share))
        edges = self._edges.astype(np.float32)
        return max(low, edges[first]), min(high, edges[min(last, 2 * _BINS - 1) + 1])

    def least_square(self) -> Range:
        """Return the range with the least squared error of rounding over the histogram."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        centres = self._edges[:-1] + self.width / 2
        centres[_BINS] = 0.0  # most often it is zero exactly
        centres, counts = centres[self.counts > 0], self.counts[self.counts > 0]

        def error(bottom: float, top: float) -> float:
            step = (top - bottom) / _STEPS
            zero = np.round(-bottom / step)
            rounded = (np.clip(np.round(centres / step) + zero, 0, _STEPS) - zero) * step
            return float(counts @ (rounded - centres) ** 2)

        bottom, top = min(0.0, float(low)), max(0.0, float(high))  # a range holds zero
        share = min(_SHARES, key=lambda share: error(share * bottom, share * top))
        bottom, top = share * bottom, share * top
        if bottom < 0 < top:
            top = min(_MOVES * top, key=lambda end: error(bottom, end))
            bottom = min(_MOVES * bottom, key=lambda end: error(end, top))
        return max(low, np.float32(bottom)), min(high, np.float32(top))


def collect_spreads(
    model: onnx.ModelProto, names: Sequence[str], inputs: Iterable[Feed], *, counted: int = 0
) -> dict[str, Spread]:
    """Return the ranges of tensors on calibration inputs, with histograms over the first `counted` inputs."""
    spreads = {name: Spread() for name in names}
    run = tensors_of(model, names)
    for number, feed in enumerate(inputs):
        for name, values in run(feed).items():
            spreads[name].add(values, counted=number < counted)
    return spreads


def tensors_of(model: onnx.ModelProto, names: Iterable[str]) -> Callable[[Feed], dict[str, Array]]:
    """Return a function that computes the named tensors of a model for an input."""
    entries = {entry.name for entry in model.graph.input}
    taken = [name for name in names if name in entries]
    computed = [name for name in names if name not in entries]
    session = _session(model, computed)

    def run(feed: Feed) -> dict[str, Array]:
        values = {name: np.asarray(array, order="C") for name, array in feed.items()}
        tensors = {name: values[name] for name in taken}
        if computed:
            tensors |= zip(computed, session.run(computed, values), strict=True)
        return tensors

    return run


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> onnxruntime.InferenceSession:
    """Open a model in onnxruntime with inner tensors as outputs, without optimisations that remove them."""
    own = list(model.graph.output)
    try:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or [own[0].name])
        content = model.SerializeToString()
    finally:
        del model.graph.output[:]
        model.graph.output.extend(own)
    return inference_session(content, 1, optimised=False, arena=False)


@dataclass(frozen=True)
class RangeChoice:
    """The method by which activation ranges and biases of integer nodes are chosen, and its results."""

    way: str
    corrected: bool = False
    reduced: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict, repr=False)
    moves: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def without_values(self) -> RangeChoice:
        """Return the method alone, for a network with other weights, whose ranges are measured anew."""
        return replace(self, ranges={}, moves={})

    def renamed(self, names: Mapping[str, str]) -> RangeChoice:
        """Return the choice for a network whose tensors have other names."""
        ranges = {new: self.ranges[old] for new, old in names.items() if old in self.ranges}
        moves = {new: self.moves[old] for new, old in names.items() if old in self.moves}
        return replace(self, ranges=ranges, moves=moves)


@cache
def sums_overflow() -> bool:
    """Test whether onnxruntime saturates sums of uint8 times int8, as on x86 processors without VNNI."""
    terms = 64
    weights = ", ".join(["127"] * terms * 16)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 13]> largest (uint8[1, {terms}] x) => (int32[1, 16] y) '
        f"<int8[{terms}, 16] w = {{{weights}}}> {{ y = MatMulInteger (x, w) }}"
    )
    session = inference_session(model.SerializeToString())
    (sums,) = session.run(None, {"x": np.full((1, terms), 255, dtype=np.uint8)})
    overflow = bool((sums != 255 * 127 * terms).any())
    if overflow:
        log.info(
            "this processor's 8-bit sums overflow (no VNNI): weights of what computes in integers get 7 bits"
        )
    return overflow


def as_in_file(
    network: nn.Module, reduce_range: bool | None, inputs: Iterable[Inputs] | None = None
) -> nn.Module:
    """Return the network with the integers of its file: itself, or a copy with weights of 7 bits."""
    bits = integer_bits(network)  # the quantiser gives all the same: where some have 7, all get 7
    if 8 not in bits or not (REDUCED_BITS in bits or reduces(reduce_range)):
        return network
    reduced = reduce_weight_range(copied(network))
    if inputs is not None:
        calibrate_ranges(reduced, inputs)
    return reduced


def integer_bits(network: nn.Module) -> set[int]:
    bits = rounded_parameters(network)
    return {bits[f"{name}.weight"] for name in integer_layers(network)}


def runnable(precisions: Sequence[str], reduce_range: bool | None = None) -> tuple[str, ...]:
    """Return precisions with `int7` in the place of `int8` where weights are to have 7 of 8 bits."""
    if "int8" not in precisions or not reduces(reduce_range):
        return tuple(precisions)
    return tuple(dict.fromkeys("int7" if name == "int8" else name for name in precisions))


def reduces(reduce_range: bool | None) -> bool:
    """Tell whether weights get 7 bits: as the option says, or where sums overflow on this processor."""
    return sums_overflow() if reduce_range is None else reduce_range


_GIVEN = "_given"
_LIMITS = np.iinfo(np.int32).min, np.iinfo(np.int32).max  # biases of integer nodes are int32


def mean_moves(plain: ir.Model, quantised: ir.Model, inputs: Iterable[Feed]) -> dict[str, Array]:
    """Return the shift of every output channel's mean in integers, by the names of nodes' outputs."""
    cut = quantised.clone()
    nodes = _corrected_nodes(plain.graph, cut.graph)
    if not nodes:
        return {}
    part, taken = _cut_before_rounding(cut, list(nodes.values()))
    session = inference_session(to_proto(part).SerializeToString(), 1)
    run = tensors_of(to_proto(plain), dict.fromkeys([*taken, *nodes]))
    sums: dict[str, Array | float] = dict.fromkeys(nodes, 0.0)
    count = 0
    for feed in inputs:
        values = run(feed)
        rounded = session.run(None, {f"{name}{_GIVEN}": values[name] for name in taken})
        for (name, node), output in zip(nodes.items(), rounded, strict=True):
            sums[name] = sums[name] + _channel_means(node, output) - _channel_means(node, values[name])
        count += 1
    return {name: np.asarray(total / max(1, count)) for name, total in sums.items()}


def correct_biases(plain: ir.Model, quantised: ir.Model, moves: Mapping[str, Array]) -> None:
    """Subtract the shifts of the means from the biases of integer nodes."""
    for name, node in _corrected_nodes(plain.graph, quantised.graph).items():
        if name in moves:
            _subtract(quantised.graph, node, moves[name])
    without_unused(quantised)  # onnxruntime would dequantise the replaced biases in every pass


def _subtract(graph: ir.Graph, node: ir.Node, move: Array) -> None:
    """Subtract a shift from the bias of a node, in floating point or in integers with a scale."""
    name, bias = f"{node.name}bias", node.inputs[2]  # free: no other name in the copy ends like this
    values = stored(bias)
    if values is not None:
        node.replace_input_with(2, add_constant(graph, name, (values - move).astype(np.float32)))
        return
    rounded = bias.producer() if bias is not None else None
    assert rounded is not None
    integers, scale = map(stored, rounded.inputs[:2])
    assert integers is not None
    assert scale is not None
    steps = np.round(integers - move / scale.astype(np.float64)).clip(*_LIMITS).astype(np.int32)
    inputs = [add_constant(graph, name, steps), *rounded.inputs[1:]]
    turned = node_of("DequantizeLinear", inputs, f"{name}_DequantizeLinear", dict(rounded.attributes))
    graph.insert_before(node, turned)
    node.replace_input_with(2, turned.outputs[0])


def _corrected_nodes(plain: ir.Graph, quantised: ir.Graph) -> dict[str, ir.Node]:
    """Return the integer nodes with a constant bias, by the names of their outputs in the float graph."""
    integer = {node.name: node for node in quantised if _rounding(node) is not None}
    return {
        str(node.outputs[0].name): integer[node.name]
        for node in plain
        if is_standard(node, "Conv", "Gemm")
        and len(node.inputs) > 2
        and stored(node.inputs[2]) is not None
        and node.name in integer
    }


def _rounding(node: ir.Node) -> ir.Node | None:
    """Return the `QuantizeLinear` of a node's input, None where the input is in floating point."""
    back = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if back is None or not dequantises(back) or back.inputs[0] is None:
        return None
    rounding = back.inputs[0].producer()
    return rounding if rounding is not None and quantises(rounding) else None


def _cut_before_rounding(model: ir.Model, nodes: Sequence[ir.Node]) -> tuple[ir.Model, list[str]]:
    """Return the part of a model from nodes' unrounded inputs to their outputs, and the inputs' names."""
    taken: dict[ir.Value, ir.Value] = {}
    for rounding in dict.fromkeys(filter(None, map(_rounding, nodes))):
        value = rounding.inputs[0]
        assert value is not None
        entry = taken.setdefault(value, ir.val(f"{value.name}{_GIVEN}", ir.DataType.FLOAT))
        rounding.replace_input_with(0, entry)
    model.graph.inputs.extend(taken.values())
    part = part_of(model, list(taken.values()), [str(node.outputs[0].name) for node in nodes])
    free_ends(part)
    return part, [str(value.name) for value in taken]


def _channel_means(node: ir.Node, output: Array) -> Array:
    channels = 1 if node.op_type == "Conv" else -1
    rows = np.moveaxis(output, channels, 0)
    means: Array = rows.reshape(len(rows), -1).mean(1, dtype=np.float64)
    return means


_OPERATORS = frozenset((*QLinearOpsRegistry, *QDQRegistry))
"""Operators that onnxruntime's quantiser knows."""
_RANGE_INPUTS, _JUDGED = 256, 64
"""Inputs that numbers are counted on, and outputs compared; the same ones in whatever order they come."""
ENDS = "ends"
WAYS: Mapping[str, Callable[[Spread], Range]] = {
    ENDS: lambda spread: spread.ends,
    "least mean square": Spread.least_square,
    "99.99 %": lambda spread: spread.percentile(1e-4),
}
_LEAST = 1e-7
"""The least probability that is told from none."""

_AT_ONCE = 2**18
"""Numbers of outputs that are compared at once."""


class StaticQuantiser:
    """onnxruntime's static quantiser over one network: int8 weights by output channel, uint8 activations."""

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[str] | None,
        excluded: Sequence[str],
        reduced: bool,
        inputs: Sequence[Feed],
        finish: Callable[[ir.Model], None],
    ) -> None:
        self._plain, self._model = model, onnx.shape_inference.infer_shapes(to_proto(model))
        add_infer_metadata(self._model)
        self._activations = _activations(self._model, nodes)
        self._nodes, self._excluded, self._reduced = nodes, excluded, reduced
        self._inputs, self._finish = inputs, finish

    def unfitted(self) -> ir.Model:
        """Quantise with ranges from the smallest to the largest number."""
        return self._written(_ranges(collect_spreads(self._model, self._activations, self._inputs), ENDS))

    def choose(self) -> RangeChoice:
        """Choose the kind of ranges with the least error at the outputs, and whether biases are corrected."""
        inputs = self._sorted_inputs
        judged = inputs[:_JUDGED]
        exact = _outputs(self._model, judged)
        spreads = collect_spreads(self._model, self._activations, inputs, counted=_RANGE_INPUTS)
        choices = {way: RangeChoice(way, False, self._reduced, _ranges(spreads, way)) for way in WAYS}
        networks = {way: self._written(choice.ranges) for way, choice in choices.items()}
        errors = {way: self._error(network, judged, exact) for way, network in networks.items()}
        log.debug("error at the outputs by ranges: %s", errors)
        best = min(errors, key=lambda way: errors[way])
        if not np.isfinite(errors[best]):
            return choices[best]
        moves = mean_moves(self._plain, networks[best], judged)
        correct_biases(self._plain, networks[best], moves)
        error = self._error(networks[best], judged, exact)
        log.debug("with corrected biases: %s", error)
        return replace(choices[best], corrected=True, moves=moves) if error < errors[best] else choices[best]

    def quantised(self, choice: RangeChoice) -> ir.Model:
        ranges, moves, known = choice.ranges, choice.moves, choice.reduced == self._reduced
        if not ranges.keys() >= set(self._activations):
            counted = 0 if choice.way == ENDS else _RANGE_INPUTS
            spreads = collect_spreads(self._model, self._activations, self._sorted_inputs, counted=counted)
            ranges, known = _ranges(spreads, choice.way), False
        network = self._written(ranges)
        if choice.corrected:
            if not known:
                moves = mean_moves(self._plain, network, self._sorted_inputs[:_JUDGED])
            correct_biases(self._plain, network, moves)
        return network

    @cached_property
    def _sorted_inputs(self) -> list[Feed]:
        """The inputs sorted by their content, so that the caller's order makes no difference."""
        return sorted(self._inputs, key=_digest)

    @staticmethod
    def _error(network: ir.Model, feeds: Sequence[Feed], exact: Sequence[Array]) -> float:
        """Return the error at the outputs, infinite where onnxruntime cannot run the network."""
        try:
            return output_error(_outputs(to_proto(network), feeds), exact)
        except Exception as error:  # onnxruntime's error classes have no common base of their own
            log.debug("onnxruntime cannot run the network in integers: %s", error)
            return np.inf

    def _written(self, ranges: Mapping[str, Range]) -> ir.Model:
        arrays = {name: tuple(map(np.asarray, ranges[name])) for name in self._activations}
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        with _quiet():
            quantiser = QDQQuantizer(
                model,
                per_channel=True,
                reduce_range=self._reduced,
                weight_qType=QuantType.QInt8,
                activation_qType=QuantType.QUInt8,
                tensors_range=TensorsData(CalibrationMethod.MinMax, arrays),
                nodes_to_quantize=list(self._nodes or ()),
                nodes_to_exclude=list(self._excluded),
                op_types_to_quantize=list(_OPERATORS),
                extra_options={},
            )
            quantiser.quantize_model()
        quantiser.model.topological_sort()
        network = ir.from_proto(quantiser.model.model)
        network.graph.sort()  # what bodies of control flow read comes before them, too
        self._finish(network)
        return network


def _ranges(spreads: Mapping[str, Spread], way: str) -> dict[str, Range]:
    return {name: WAYS[way](spread) for name, spread in spreads.items()}


def output_error(outputs: Sequence[Array], exact: Sequence[Array]) -> float:
    """Return the relative error of outputs, averaged over the outputs.

    It is the mean square error / variance. Where all numbers of an output lie between 0 and 1 they are taken
    for probabilities, and it is their divergence (Kullback and Leibler) / that of their mean.
    """
    errors = []
    for computed, right in zip(outputs, exact, strict=True):
        if not right.size or right.min() == right.max():
            continue
        term = _divergence if right.min() >= 0 and right.max() <= 1 else _square
        mean = np.broadcast_to(right.mean(dtype=np.float64), right.shape)
        errors.append(_total(term, computed, right) / _total(term, mean, right))
    return float(np.mean(errors)) if errors else 0.0


def _total(term: Callable[[Array, Array], Array], computed: Array, right: Array) -> float:
    """Return the sum of an error's terms, computed in chunks to bound the memory."""
    computed, right, total = computed.reshape(-1), right.reshape(-1), 0.0
    for start in range(0, right.size, _AT_ONCE):
        parts = (each[start : start + _AT_ONCE].astype(np.float64) for each in (computed, right))
        total += float(term(*parts).sum())
    return total


def _square(computed: Array, right: Array) -> Array:
    return np.asarray((computed - right) ** 2)


def _divergence(computed: Array, right: Array) -> Array:
    """Return the divergences of probabilities, each of one event and its opposite."""
    computed, right = (each.clip(_LEAST, 1 - _LEAST) for each in (computed, right))
    return np.asarray(right * np.log(right / computed) + (1 - right) * np.log((1 - right) / (1 - computed)))


def _outputs(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[Array]:
    """Return the float outputs of a network, the numbers of all inputs one after the other."""
    session = inference_session(model.SerializeToString(), 1)
    runs = [
        session.run(None, {name: np.asarray(array, order="C") for name, array in feed.items()})
        for feed in feeds
    ]
    outputs = zip(*runs, strict=True)
    return [np.concatenate([run.ravel() for run in each]) for each in outputs if each[0].dtype.kind == "f"]


def _activations(model: onnx.ModelProto, nodes: Collection[str] | None) -> list[str]:
    """Return the names of float tensors that nodes take and give, those of all that can when `None`."""
    graph = model.graph
    kinds = {each.name: each.type.tensor_type for each in (*graph.value_info, *graph.input, *graph.output)}
    stored = {tensor.name for tensor in graph.initializer}
    taken = [
        name
        for node in graph.node
        if node.op_type in _OPERATORS and (nodes is None or node.name in nodes)
        for name in (*node.input, *node.output)
    ]
    return [
        name
        for name in dict.fromkeys(taken)
        if name in kinds and name not in stored and kinds[name].elem_type == onnx.TensorProto.FLOAT
    ]


def _digest(feed: Feed) -> bytes:
    return hashlib.sha256(b"".join(feed[name].tobytes() for name in sorted(feed))).digest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantiser's advice to optimise the graph first: our files are."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
