"""Operators are known by their domain and their name: another domain's `Conv` need not be ONNX's own."""

from __future__ import annotations

from typing import Protocol

STANDARD = ("", "ai.onnx")
"""What files call the domain of ONNX's own operators."""
MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's, in which it has variants of ONNX's quantising operators."""


class Operation(Protocol):
    """A node of a graph, of protobuf or of onnx_ir."""

    @property
    def domain(self) -> str:
        """The domain of the operator."""

    @property
    def op_type(self) -> str:
        """Its name there."""


def is_standard(node: Operation, *op_types: str) -> bool:
    """Tell whether a node is one of ONNX's own operators.

    Args:
        node: The node.
        op_types: Names of operators; without any, all of ONNX's count.
    """
    return node.domain in STANDARD and (not op_types or node.op_type in op_types)


def quantises(node: Operation) -> bool:
    """Tell whether a node rounds a tensor to integers (QuantizeLinear)."""
    return node.op_type == "QuantizeLinear" and node.domain in (*STANDARD, MICROSOFT)


def dequantises(node: Operation) -> bool:
    """Tell whether a node turns integers back into floating point (DequantizeLinear)."""
    return node.op_type == "DequantizeLinear" and node.domain in (*STANDARD, MICROSOFT)
