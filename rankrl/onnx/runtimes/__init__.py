"""Run ONNX files in registered runtimes, one class each; `list_runtimes()` lists them."""

from __future__ import annotations

from rankrl.onnx.runtimes import onnx_runtime, openvino_cpu
from rankrl.onnx.runtimes.runtime import (
    DEFAULT_RUNTIME,
    Batch,
    Runtime,
    Session,
    check_runtimes,
    get_runtime,
    list_runtimes,
    open_session,
    register_runtime,
)

__all__ = [
    "DEFAULT_RUNTIME",
    "Batch",
    "Runtime",
    "Session",
    "check_runtimes",
    "get_runtime",
    "list_runtimes",
    "onnx_runtime",
    "open_session",
    "openvino_cpu",
    "register_runtime",
]
