"""Operators, identified by domain and name: the `Conv` of another domain need not be ONNX's own."""

from __future__ import annotations

import onnx_ir as ir

STANDARD = ("", "ai.onnx")
"""What files call the domain of ONNX's own operators."""
MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's, in which it has variants of ONNX's quantising operators."""


def opset_of(model: ir.Model) -> int:
    """Return the version of ONNX's own operators that a model uses, 0 where it says none."""
    return next((version for domain, version in model.opset_imports.items() if domain in STANDARD), 0)


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Tell whether a node is one of ONNX's own operators."""
    return node.domain in STANDARD and (not op_types or node.op_type in op_types)


def quantises(node: ir.Node) -> bool:
    """Tell whether a node rounds a tensor to integers (QuantizeLinear)."""
    return node.op_type == "QuantizeLinear" and node.domain in (*STANDARD, MICROSOFT)


def dequantises(node: ir.Node) -> bool:
    """Tell whether a node turns integers back into floating point (DequantizeLinear)."""
    return node.op_type == "DequantizeLinear" and node.domain in (*STANDARD, MICROSOFT)
