"""ONNX files in 8-bit integers, by onnxruntime's own quantiser.

Weights become int8, one scale an output channel; activations uint8, one scale a tensor, from the ranges that
they take on calibration inputs (static quantisation; Jacob et al., CVPR 2018). The file says so by pairs of
QuantizeLinear and DequantizeLinear (QDQ), which onnxruntime fuses to integer kernels when it loads it.
Signed activations would be as accurate and, on processors with AVX-512 VNNI, three times slower.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from rankrl.export.errors import ExportError
from rankrl.export.session import fixed_batch, open_session, run

_LEAST_OPSET = 13  # the first in which QuantizeLinear has a scale for each channel


def quantise_onnx(path: str | Path, target: str | Path, inputs: Iterable[np.ndarray[Any, Any]]) -> Path:
    """Write an ONNX file whose convolutions and matrix products compute in 8-bit integers.

    Args:
        path: A float32 file with one input.
        target: The file to write.
        inputs: Calibration batches, of the type and shape that the file takes; at least one.

    Returns:
        `target`.

    Raises:
        ExportError: The file is missing or quantised already, its opset is below 13, there are no calibration
            inputs, the network's outputs on them are not finite, or onnxruntime cannot quantise the file.
    """
    path, target = Path(path), Path(target)
    session = open_session(path)
    _check_graph(path)
    fixed = fixed_batch(session)
    batches = [batch for batch in inputs if fixed in (None, len(batch))]
    if not batches:
        wanted = "" if fixed is None else f" of {fixed}, the batch size of the file,"
        raise ExportError(
            f"{path} cannot be quantised without calibration batches{wanted}: give a few hundred inputs."
        )
    for output in run(session, batches[0]):
        if not np.isfinite(output).all():
            raise ExportError(
                f"{path} returns NaN or infinite values on the calibration inputs, so there are no ranges to "
                "quantise to; check the network and the inputs."
            )
    try:
        with _quiet():
            quantize_static(
                path,
                target,
                _Reader(session.get_inputs()[0].name, batches),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    except Exception as error:  # whatever onnxruntime's Python code stumbles over
        target.unlink(missing_ok=True)
        raise ExportError(f"onnxruntime cannot quantise {path}: {error}") from error
    return target


class _Reader(CalibrationDataReader):
    """Hands batches to the quantiser."""

    def __init__(self, name: str, batches: Iterable[np.ndarray[Any, Any]]) -> None:
        self._name, self._batches = name, iter(batches)

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: np.ascontiguousarray(batch)}


def _check_graph(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    if opset < _LEAST_OPSET:
        raise ExportError(
            f"{path} has opset {opset}; 8-bit integers need {_LEAST_OPSET} or newer. Export it with "
            "export.opset=null."
        )
    if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        raise ExportError(f"{path} is quantised already; quantise the float32 file that it was made from.")


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
