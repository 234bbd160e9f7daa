"""Quantise a graph with onnxruntime's static quantiser, choosing ranges and correcting biases.

Biases are corrected as by Nagel et al. (ICCV 2019, section 4.2): rounding a weight, and clipping its input,
shift the mean of every output channel. The shift is measured node by node, on the inputs that the node has in
floating point, and subtracted from its bias.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import add_infer_metadata
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from rankrl.onnx.export.ranges import Array, Feed, Range, RangeChoice, Spread, collect_spreads, tensors_of
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
from rankrl.onnx.runtimes.onnx_runtime import inference_session

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
    """Return the mean of every output channel."""
    channels = 1 if node.op_type == "Conv" else -1
    rows = np.moveaxis(output, channels, 0)
    means: Array = rows.reshape(len(rows), -1).mean(1, dtype=np.float64)
    return means


_OPERATORS = frozenset((*QLinearOpsRegistry, *QDQRegistry))
"""What onnxruntime's quantiser knows."""
_COUNTED, _JUDGED = 256, 64
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

log = logging.getLogger(__name__)


class StaticQuantiser:
    """onnxruntime's static quantiser over one network.

    Weights become int8, one scale an output channel, activations uint8.
    """

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
        """Choose the kind of ranges with the least error at the outputs.

        Biases are corrected where that reduces it.
        """
        inputs = self._sorted_inputs
        judged = inputs[:_JUDGED]
        exact = _outputs(self._model, judged)
        spreads = collect_spreads(self._model, self._activations, inputs, counted=_COUNTED)
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
        """Return the network in integers."""
        ranges, moves, known = choice.ranges, choice.moves, choice.reduced == self._reduced
        if not ranges.keys() >= set(self._activations):
            counted = 0 if choice.way == ENDS else _COUNTED
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
        """Return the network in integers with some ranges."""
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
    content = hashlib.sha256()
    for name in sorted(feed):
        content.update(np.ascontiguousarray(feed[name]).tobytes())
    return content.digest()


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
