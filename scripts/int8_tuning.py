"""Quantise an ONNX file as others do: onnxruntime's quantiser, plain and tuned by an expert, and NNCF."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import version_converter
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_dynamic
from onnxruntime.quantization.calibrate import create_calibrator
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
from onnxruntime.quantization.shape_inference import quant_pre_process
from real_files import Feed, Outputs, RealFile

from rankrl.onnx.export.static_quantiser import sums_overflow
from rankrl.onnx.runtimes import Session, open_session
from rankrl.timing.latency import measure_latency

COMPUTING = ("Conv", "MatMul", "Gemm")
"""Nodes whose sensitivity decides what is left in floating point."""
DROP = 0.005
"""Loss that tuning may cost of the score on the inputs that methods see."""
_LEAST_OPSET = 13
RANGES, _HISTOGRAMS, _COMPARED, _JUDGED = 64, 16, 8, 40
"""Inputs for ranges by their ends, by histograms, for the sensitivity of nodes, and to judge what is made."""
_METHODS = {
    "minmax": (CalibrationMethod.MinMax, {}),
    "percentile": (CalibrationMethod.Percentile, {"percentile": 99.99, "symmetric": False}),
    "entropy": (CalibrationMethod.Entropy, {}),
}


class _Reader(CalibrationDataReader):
    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self._feeds, None)


class Quantiser:
    """onnxruntime's static quantiser over one file; ranges are measured once for each way.

    Weights are int8, one scale a channel; activations uint8.
    """

    def __init__(self, file: RealFile, folder: Path) -> None:
        self.file, self.folder = file, folder
        self._known: dict[str, Any] = {}

    @cached_property
    def plain(self) -> Path:
        """The file in an operator set with a scale a channel, prepared as onnxruntime advises."""
        model = onnx.load(self.file.path)
        opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        if opset < _LEAST_OPSET:
            model = version_converter.convert_version(model, _LEAST_OPSET)
            model.ir_version = max(model.ir_version, 7)
        read, target = self.folder / "read.onnx", self.folder / "plain.onnx"
        onnx.save(model, read)
        quant_pre_process(read, target, skip_symbolic_shape=True)
        prepared = onnx.load(target)
        for index, node in enumerate(prepared.graph.node):
            node.name = node.name or f"{node.op_type}_{index}"
        onnx.save(prepared, target)
        return target

    @cached_property
    def nodes(self) -> list[str]:
        return [node.name for node in onnx.load(self.plain).graph.node if node.op_type in COMPUTING]

    @cached_property
    def convolutions(self) -> list[str]:
        return [node.name for node in onnx.load(self.plain).graph.node if node.op_type == "Conv"]

    @property
    def able(self) -> list[str]:
        """Names of those that the quantiser takes; where it fails at all of them together, each is tried."""
        with suppress(ValueError):
            self.write(self.folder / "tried.onnx")
            return self.nodes
        names = []
        for name in self.nodes:
            with suppress(ValueError):
                self.write(self.folder / "tried.onnx", only=[name])
                names.append(name)
        return names

    def ranges(self, way: str) -> Any:
        if way not in self._known:
            method, options = _METHODS[way]
            calibrator = create_calibrator(
                self.plain,
                list(_operators()),
                augmented_model_path=str(self.folder / "augmented.onnx"),
                calibrate_method=method,
                extra_options=options,
            )
            count = RANGES if way == "minmax" else _HISTOGRAMS
            for feed in islice(self.file.fitted.feeds, count):  # together they would not fit into memory
                calibrator.collect_data(_Reader([feed]))
            self._known[way] = calibrator.compute_data()
        return self._known[way]

    def write(
        self, target: Path, *, only: Sequence[str] = (), without: Collection[str] = (), way: str = "minmax"
    ) -> Path:
        """Write the file in integers: all nodes that can be, or `only` those named, `without` others."""
        quantiser = QDQQuantizer(
            load_model_with_shape_infer(self.plain),
            True,
            sums_overflow(),
            QuantType.QInt8,
            QuantType.QUInt8,
            self.ranges(way),
            list(only),
            list(without),
            list(_operators()),
            {},
        )
        quantiser.quantize_model()
        quantiser.model.save_model_to_file(str(target), False)
        return target


def _operators() -> set[str]:
    return {*QLinearOpsRegistry, *QDQRegistry}


@dataclass(frozen=True)
class _Attempt:
    """A file that was tried: its score on inputs that methods may see, and its time in milliseconds."""

    score: float
    time: float
    path: Path
    words: str


class Tuning:
    """Integers tuned as an expert would: ranges in three ways, and the most sensitive nodes left out."""

    def __init__(self, quantiser: Quantiser) -> None:
        self.quantiser, self.file = quantiser, quantiser.file
        self.judged = self.file.fitted.part(0, _JUDGED)
        self.originals = outputs_of(open_session(self.file.path, threads=1), self.judged.feeds)

    def error(self, path: Path, count: int) -> float:
        """Measure how far the outputs are from the original's, relative to their spread (the mean square)."""
        answers = outputs_of(open_session(path, threads=1), islice(self.judged.feeds, count))
        errors = []
        for new, old in zip(
            zip(*answers, strict=True), zip(*self.originals[:count], strict=True), strict=True
        ):
            if old[0].dtype.kind == "f":
                spread = np.var(np.concatenate([each.ravel() for each in old]))
                errors.append(
                    np.mean([np.mean((a - b) ** 2) for a, b in zip(new, old, strict=True)]) / spread
                )
        return float(np.mean(errors))

    def score(self, path: Path) -> float:
        answers = outputs_of(open_session(path, threads=1), self.judged.feeds)
        return self.file.tuned(answers, self.judged.known, self.originals)

    def write(self, target: Path) -> str:
        """Write the fastest file that loses at most `DROP`, or else that with the best score."""
        quantiser, scratch = self.quantiser, self.quantiser.folder / "tried.onnx"
        able = quantiser.able
        everything = () if able == quantiser.nodes else tuple(able)
        ways = {
            way: self.error(quantiser.write(scratch, only=everything, way=way), _JUDGED) for way in _METHODS
        }
        way = min(ways, key=lambda each: ways[each])
        sensitivity = {
            node: self.error(quantiser.write(scratch, only=[node], way=way), _COMPARED) for node in able
        }
        order = sorted(sensitivity, key=lambda node: -sensitivity[node])
        least = self.file.tuned(self.originals, self.judged.known, self.originals) - DROP
        attempts = [
            self._fewest(only, [node for node in order if not only or node in only], way, least, words)
            for only, words in ((everything, "all"), (tuple(quantiser.convolutions), "convolutions"))
            if only or words == "all"
        ]
        keeping = [each for each in attempts if each.score >= least]
        best = min(keeping, key=lambda each: each.time) if keeping else max(attempts, key=lambda e: e.score)
        target.write_bytes(best.path.read_bytes())
        return f"{best.words}, {way}"

    def _fewest(
        self, only: Sequence[str], order: Sequence[str], way: str, least: float, words: str
    ) -> _Attempt:
        """Leave out as few of the most sensitive nodes as keep the score, by bisection."""
        tried: dict[int, _Attempt] = {}

        def attempt(count: int) -> _Attempt:
            if count not in tried:
                path = self.quantiser.folder / f"{words}-{count}.onnx"
                self.quantiser.write(path, only=only, without=order[:count], way=way)
                time = _milliseconds(path, next(self.judged.feeds))
                tried[count] = _Attempt(
                    self.score(path), time, path, f"{words} but {count}" if count else words
                )
            return tried[count]

        low, high = 0, max(1, len(order) // 2)
        if attempt(low).score < least <= attempt(high).score:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if attempt(middle).score >= least else (middle, high)
        keeping = [count for count, each in tried.items() if each.score >= least]
        return tried[min(keeping)] if keeping else max(tried.values(), key=lambda each: each.score)


def outputs_of(session: Session, feeds: Iterable[Feed]) -> list[Outputs]:
    return [session.run(feed) for feed in feeds]


def _milliseconds(path: Path, feed: Feed) -> float:
    return measure_latency(path, batch=1, runs=10, inputs=feed).ms


Written = Callable[[RealFile, Path], str]
"""Writes a file and returns what else there is to say of it."""


@contextmanager
def _quantiser(file: RealFile) -> Iterator[Quantiser]:
    with tempfile.TemporaryDirectory() as folder:
        yield Quantiser(file, Path(folder))


def original(file: RealFile, target: Path) -> str:
    target.write_bytes(file.path.read_bytes())
    return file.meaning


def int8(file: RealFile, target: Path) -> str:
    """Quantise everything by the ends of the ranges, as the quantiser does by itself."""
    with _quantiser(file) as quantiser:
        quantiser.write(target)
    return ""


def int8_convolutions(file: RealFile, target: Path) -> str:
    with _quantiser(file) as quantiser:
        quantiser.write(target, only=quantiser.convolutions)
    return ""


def int8_dynamic(file: RealFile, target: Path) -> str:
    """Quantise matrix products and recurrent layers, ranges found while it runs."""
    with _quantiser(file) as quantiser:
        operators = ["MatMul", "Gemm", "LSTM"]
        quantize_dynamic(quantiser.plain, target, op_types_to_quantize=operators, per_channel=True)
    return ""


def int8_tuned(file: RealFile, target: Path) -> str:
    with _quantiser(file) as quantiser:
        return Tuning(quantiser).write(target)


def nncf_onnx(file: RealFile, target: Path) -> str:
    nncf = _nncf()
    with _quantiser(file) as quantiser:
        model = onnx.load(quantiser.plain)
        feeds = list(islice(file.fitted.feeds, RANGES))
        onnx.save(nncf.quantize(model, nncf.Dataset(feeds), preset=nncf.QuantizationPreset.MIXED), target)
    return ""


def nncf_openvino(file: RealFile, target: Path) -> str:
    """Let NNCF quantise the file for OpenVINO; weights lie next to the target, in a .bin."""
    import openvino

    nncf = _nncf()
    feeds = list(islice(file.fitted.feeds, RANGES))
    model = openvino.Core().read_model(file.path)
    quantised = nncf.quantize(model, nncf.Dataset(feeds), preset=nncf.QuantizationPreset.MIXED)
    openvino.save_model(quantised, target, compress_to_fp16=False)
    return ""


def _nncf() -> Any:
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf


@dataclass(frozen=True)
class Rival:
    """A method, what runs its file, and the modules that it needs."""

    write: Written
    runtime: str = "onnxruntime"
    packages: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        return ".xml" if self.write is nncf_openvino else ".onnx"


RIVALS = {
    "original": Rival(original),
    "int8": Rival(int8),
    "int8, convolutions": Rival(int8_convolutions),
    "int8, dynamic": Rival(int8_dynamic),
    "int8, tuned": Rival(int8_tuned),
    "NNCF": Rival(nncf_onnx, packages=("nncf",)),
    "original, OpenVINO": Rival(original, "openvino", ("openvino",)),
    "NNCF, OpenVINO": Rival(nncf_openvino, "openvino", ("nncf", "openvino")),
}
