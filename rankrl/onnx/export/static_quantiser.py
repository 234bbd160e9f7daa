"""onnxruntime's static quantiser over one network: ranges and biases by the error at the outputs."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from rankrl.onnx.export.bias_correction import with_corrected_biases
from rankrl.onnx.export.ranges import Array, Cut, Feed, Spread, collect_spreads, count_values
from rankrl.onnx.protobuf import load_model, save_model, to_proto
from rankrl.onnx.runtimes.onnxruntime_cpu import inference_session

_OPERATORS = frozenset((*QLinearOpsRegistry, *QDQRegistry))
"""What onnxruntime's quantiser knows."""
_COUNTED, _JUDGED = 256, 64
"""Inputs that numbers are counted on, and outputs compared; the same ones in whatever order they come."""
_WAYS: Mapping[str, Callable[[Spread], tuple[np.float32, np.float32]]] = {
    "ends": lambda spread: spread.ends,
    "least mean square": Spread.least_square,
    "99.99 %": lambda spread: spread.percentile(1e-4),
}
_LEAST = 1e-7
"""The least probability that is told from none."""

log = logging.getLogger(__name__)


class StaticQuantiser:
    """onnxruntime's static quantiser over one network.

    Weights become int8, one scale an output channel, activations uint8.

    Args:
        path: The network in float32.
        nodes: Names of the nodes that are to compute in integers, all that can when `None`.
        excluded: Names of nodes that are not to.
        reduced: Whether weights have 7 bits.
        folder: For files in between.
    """

    def __init__(
        self, path: Path, nodes: Sequence[str] | None, excluded: Sequence[str], reduced: bool, folder: Path
    ) -> None:
        self._path, self._scratch = path, folder / "quantised.onnx"
        self._corrected = folder / "corrected.onnx"
        self._nodes, self._excluded, self._reduced = nodes, excluded, reduced

    def quantised(
        self, batches: Sequence[Feed], cut: Cut, *, fitted: bool, finish: Callable[[ir.Model], None]
    ) -> ir.Model:
        """Return the network in integers.

        Args:
            batches: Calibration inputs.
            cut: Cuts batches into smaller ones.
            fitted: Whether ranges are those, of several kinds, with the least error at the outputs, and
                biases are corrected where it gets less; else ranges reach from the smallest to the largest
                number.
            finish: Changes a quantised network before it is judged.
        """
        model = load_model_with_shape_infer(self._path)
        spreads = collect_spreads(model, _activations(model, self._nodes), batches, cut)
        if not fitted:
            return self._written(self._path, spreads, "ends", finish)
        singles = sorted((part for feed in batches for part in cut(feed, 1)), key=_digest)
        count_values(model, spreads, singles[:_COUNTED], cut)
        judged = singles[:_JUDGED]
        exact = _outputs(model, judged)
        del model
        networks = {way: self._written(self._path, spreads, way, finish) for way in _WAYS}
        errors = {way: self._error(network, judged, exact) for way, network in networks.items()}
        log.debug("error at the outputs by ranges: %s", errors)
        best = min(errors, key=lambda way: errors[way])
        if not np.isfinite(errors[best]):
            return networks[best]
        save_model(with_corrected_biases(self._path, networks[best], judged, cut), self._corrected)
        corrected = self._written(self._corrected, spreads, best, finish)
        error = self._error(corrected, judged, exact)
        log.debug("with corrected biases: %s", error)
        return corrected if error < errors[best] else networks[best]

    @staticmethod
    def _error(network: ir.Model, feeds: Sequence[Feed], exact: Sequence[Array]) -> float:
        """Return the error at the outputs, infinite where onnxruntime cannot run the network."""
        try:
            return output_error(_outputs(to_proto(network), feeds), exact)
        except Exception as error:  # onnxruntime's error classes have no common base of their own
            log.debug("onnxruntime cannot run the network in integers: %s", error)
            return np.inf

    def _written(
        self, path: Path, spreads: Mapping[str, Spread], way: str, finish: Callable[[ir.Model], None]
    ) -> ir.Model:
        """Return a network in integers with some ranges."""
        ranges = {name: tuple(map(np.asarray, _WAYS[way](spread))) for name, spread in spreads.items()}
        with _quiet():
            quantiser = QDQQuantizer(
                load_model_with_shape_infer(path),
                per_channel=True,
                reduce_range=self._reduced,
                weight_qType=QuantType.QInt8,
                activation_qType=QuantType.QUInt8,
                tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
                nodes_to_quantize=list(self._nodes or ()),
                nodes_to_exclude=list(self._excluded),
                op_types_to_quantize=list(_OPERATORS),
                extra_options={},
            )
            quantiser.quantize_model()
        quantiser.model.save_model_to_file(str(self._scratch), False)
        model = load_model(self._scratch)
        finish(model)
        return model


def output_error(outputs: Sequence[Array], exact: Sequence[Array]) -> float:
    """Return how far outputs are from what they should be, the mean over the outputs.

    It is the mean square error / variance. Where all numbers of an output lie between 0 and 1 they are taken
    for probabilities, and it is their divergence (Kullback and Leibler) / that of their mean.
    """
    errors = []
    for new, old in zip(outputs, exact, strict=True):
        found, right = (np.asarray(each, np.float64) for each in (new, old))
        if not right.size or right.min() == right.max():
            continue
        probable = right.min() >= 0 and right.max() <= 1
        error = _divergence if probable else _square_error
        errors.append(error(found, right) / error(np.full_like(right, right.mean()), right))
    return float(np.mean(errors)) if errors else 0.0


def _square_error(found: Array, right: Array) -> float:
    return float(np.mean((found - right) ** 2))


def _divergence(found: Array, right: Array) -> float:
    """Return the mean divergence of probabilities, each of one event and its opposite."""
    found, right = (each.clip(_LEAST, 1 - _LEAST) for each in (found, right))
    return float(np.mean(right * np.log(right / found) + (1 - right) * np.log((1 - right) / (1 - found))))


def _outputs(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[Array]:
    """Return the float outputs of a network, the numbers of all inputs one after the other."""
    session = inference_session(model.SerializeToString())
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
