"""What others make of an ONNX file in 8-bit integers: onnxruntime's quantiser, plain and tuned, and NNCF."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import onnx
from int8_tuning import RANGES, Quantiser, Tuning
from onnxruntime.quantization import quantize_dynamic
from real_files import RealFile

Written = Callable[[RealFile, Path], str]
"""Writes a file and returns what else there is to say of it."""


@contextmanager
def _quantiser(file: RealFile) -> Iterator[Quantiser]:
    with tempfile.TemporaryDirectory() as folder:
        yield Quantiser(file, Path(folder))


def original(file: RealFile, target: Path) -> str:
    """Copy the file, and say what its score is."""
    target.write_bytes(file.path.read_bytes())
    return file.meaning


def int8(file: RealFile, target: Path) -> str:
    """Quantise everything by the ends of the ranges, as the quantiser does by itself."""
    with _quantiser(file) as quantiser:
        quantiser.write(target)
    return ""


def int8_convolutions(file: RealFile, target: Path) -> str:
    """Quantise convolutions alone."""
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
    """Tune by `Tuning`."""
    with _quantiser(file) as quantiser:
        return Tuning(quantiser).write(target)


def nncf_onnx(file: RealFile, target: Path) -> str:
    """Let NNCF quantise the file for onnxruntime."""
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
    """A method.

    Attributes:
        write: What it does.
        runtime: What runs its file.
        packages: Modules that it needs.
    """

    write: Written
    runtime: str = "onnxruntime"
    packages: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """The ending of its files."""
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
