"""onnxruntime's static quantiser over one network: ranges and biases by the error at the outputs."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from rankrl.onnx.export.bias_correction import correct_biases, mean_moves
from rankrl.onnx.export.range_choice import RangeChoice
from rankrl.onnx.export.ranges import Array, Feed, Range, Spread, collect_spreads
from rankrl.onnx.protobuf import to_proto
from rankrl.onnx.runtimes.onnxruntime_cpu import inference_session

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
        """Return the network in integers whose ranges reach from the smallest to the largest number."""
        return self._written(_ranges(collect_spreads(self._model, self._activations, self._inputs), ENDS))

    def choose(self) -> RangeChoice:
        """Choose the ranges, of several kinds, with the least error at the outputs.

        Biases are corrected where it gets less.
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
        """The inputs in an order that depends on nothing but them."""
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
    """Return how far outputs are from what they should be, the mean over the outputs.

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
    """Return the sum of an error's terms, a part of the numbers at a time."""
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
