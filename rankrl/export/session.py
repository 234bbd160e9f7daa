"""Opening ONNX files in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from rankrl.export.errors import ExportError

_ERRORS_ONLY = 3


def open_session(path: str | Path, *, threads: int | None = None) -> onnxruntime.InferenceSession:
    """Open an ONNX file for inference on the CPU.

    Args:
        path: The file.
        threads: Number of threads that compute one operator; None for onnxruntime's default (all cores).

    Returns:
        The session.

    Raises:
        ExportError: The file is missing, or onnxruntime cannot load it.
    """
    if threads is not None and threads < 1:
        raise ExportError(f"threads is {threads}; it must be at least 1.")
    if not Path(path).is_file():
        raise ExportError(f"there is no ONNX file at {path}; export the model first.")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    # Sessions are timed in turns: the threads of one that has finished must not spin while another runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's error classes have no common base of their own
        raise ExportError(f"onnxruntime cannot load {path}: {error}") from error


def fixed_batch(session: onnxruntime.InferenceSession) -> int | None:
    """The batch size that the file was exported with, or None where it is free."""
    batch = session.get_inputs()[0].shape[0]
    return batch if isinstance(batch, int) else None


def input_dtype(session: onnxruntime.InferenceSession) -> np.dtype[Any] | None:
    """The type of the images that the file takes: float32 (normalised) or uint8 (bytes); None for others."""
    known: dict[str, np.dtype[Any]] = {
        "tensor(float)": np.dtype(np.float32),
        "tensor(uint8)": np.dtype(np.uint8),
    }
    return known.get(session.get_inputs()[0].type)


def run(session: onnxruntime.InferenceSession, batch: np.ndarray[Any, Any]) -> Sequence[np.ndarray[Any, Any]]:
    """Run the model on a batch and return all its outputs.

    Raises:
        ExportError: The batch does not fit the model's input.
    """
    entry = session.get_inputs()[0]
    try:
        outputs: Sequence[np.ndarray[Any, Any]] = session.run(None, {entry.name: np.ascontiguousarray(batch)})
    except Exception as error:  # onnxruntime's error classes have no common base of their own
        raise ExportError(
            f"the ONNX model takes {entry.type} of shape {entry.shape} and fails on {batch.dtype} of shape "
            f"{batch.shape}: {error}"
        ) from error
    return outputs
