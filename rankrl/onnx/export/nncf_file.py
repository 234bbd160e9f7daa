"""Networks in 8-bit integers by NNCF, for OpenVINO: what a user of OpenVINO would do without rankrl.

NNCF (extra `nncf`, Apache-2.0) quantises OpenVINO's own graph: weights with one scale an output channel,
activations with one a tensor, biases corrected for the shift of the means that rounding makes.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from rankrl.onnx.errors import ExportError
from rankrl.onnx.runtimes import Batch

_MOST_BATCHES = 300
"""Batches that NNCF looks at; it takes this many by itself."""


def nncf_obstacle() -> str | None:
    """Return that a package is missing and how to get it, where one is."""
    for package in ("openvino", "nncf"):
        try:
            importlib.import_module(package)
        except ImportError:
            return f"NNCF's int8 needs the package {package}; install it with `pip install 'rankrl[nncf]'`"
    return None


def quantise_with_nncf(path: str | Path, target: str | Path, inputs: Iterable[Batch]) -> Path:
    """Write a network in 8-bit integers as NNCF makes it."""
    obstacle = nncf_obstacle()
    if obstacle is not None:
        raise ExportError(obstacle)
    nncf: Any = importlib.import_module("nncf")
    openvino: Any = importlib.import_module("openvino")
    target = Path(target)
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = openvino.Core().read_model(str(path))
            data = nncf.Dataset(list(islice(inputs, _MOST_BATCHES)))
            quantised = nncf.quantize(model, data, preset=nncf.QuantizationPreset.MIXED)
            openvino.save_model(quantised, str(target), compress_to_fp16=False)
    except Exception as error:  # NNCF's and OpenVINO's errors have no common base
        raise ExportError(f"NNCF cannot quantise {path}: {error}") from error
    finally:
        logger.setLevel(level)
    return target
