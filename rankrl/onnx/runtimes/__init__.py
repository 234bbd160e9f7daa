"""Runtimes: what runs an ONNX file. Each is one registered class, `list_runtimes()` lists them."""

from __future__ import annotations

from rankrl.onnx.runtimes import onnxruntime_cpu, onnxruntime_cuda, openvino_cpu
from rankrl.onnx.runtimes.base import Batch, Runtime, Session
from rankrl.onnx.runtimes.registry import (
    DEFAULT_RUNTIME,
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
    "onnxruntime_cpu",
    "onnxruntime_cuda",
    "open_session",
    "openvino_cpu",
    "register_runtime",
]
