"""ONNX files of (compressed) models: written, compared with PyTorch, and timed."""

from __future__ import annotations

from rankrl.export.errors import ExportError
from rankrl.export.int8 import quantise_onnx
from rankrl.export.latency import (
    Latency,
    LatencyComparison,
    TimedTurns,
    compare_latency,
    is_unchanged,
    measure_latency,
    time_in_turns,
)
from rankrl.export.layer_latency import measure_layer_latencies
from rankrl.export.network_file import class_agreement, export_network
from rankrl.export.onnx_file import ExportResult, export_onnx
from rankrl.export.rank_step import fast_multiple
from rankrl.export.runtimes import DEFAULT_RUNTIME, get_runtime, list_runtimes, open_session, register_runtime
from rankrl.export.verification import onnx_accuracy, verify_onnx

__all__ = [
    "DEFAULT_RUNTIME",
    "ExportError",
    "ExportResult",
    "Latency",
    "LatencyComparison",
    "TimedTurns",
    "class_agreement",
    "compare_latency",
    "export_network",
    "export_onnx",
    "fast_multiple",
    "get_runtime",
    "is_unchanged",
    "list_runtimes",
    "measure_latency",
    "measure_layer_latencies",
    "onnx_accuracy",
    "open_session",
    "quantise_onnx",
    "register_runtime",
    "time_in_turns",
    "verify_onnx",
]
