"""Export (compressed) modules as ONNX files, quantise the files and compare them with PyTorch."""

from __future__ import annotations

from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.onnx_file import ExportResult, class_agreement, export_network, export_onnx
from rankrl.onnx.export.tracing import onnx_accuracy, verify_onnx

__all__ = [
    "ExportResult",
    "class_agreement",
    "export_network",
    "export_onnx",
    "onnx_accuracy",
    "quantise_onnx",
    "verify_onnx",
]
