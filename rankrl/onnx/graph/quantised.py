"""Nodes that compute in integers already, and weights that a file holds in integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from rankrl.onnx.graph_edits import Array
from rankrl.onnx.operators import MICROSOFT, STANDARD, dequantises, is_standard, quantises

MOVING = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
"""Operators behind which a constant is the same one, turned or reshaped."""

_OPSET = 21
"""An operator set in which the reference evaluator knows all that is followed, as those before it do it."""
_OPERANDS = {
    "QLinearConv": (3, 8),
    "QLinearMatMul": (3, 0),
    "QGemm": (3, 6),
    "ConvInteger": (1,),
    "MatMulInteger": (1, 0),
    "MatMulIntegerToFloat": (1, 6),
    "DynamicQuantizeMatMul": (1, 4),
    "DynamicQuantizeLSTM": (1, 2, 3, 7),
    "MatMulNBits": (1, 5),
    "QAttention": (1, 2),
}
"""Which inputs of integer operators may be parameters, the weight first; others are scales and zero points.

Specifications: ai.onnx, and onnxruntime's ContribOperators.md for those of com.microsoft.
"""


def computes_integers(node: ir.Node) -> bool:
    """Tell whether a node is a convolution or product of integers."""
    return node.op_type in _OPERANDS and node.domain in (*STANDARD, MICROSOFT)


def rounds(node: ir.Node) -> bool:
    """Tell whether the smallest change of what a node takes may become a step of what it gives."""
    return quantises(node) or computes_integers(node) or is_standard(node, "DynamicQuantizeLinear")


def parameters_of(node: ir.Node) -> list[str]:
    """Return the names of what a node multiplies and adds, without the scales and zero points of integers."""
    operands = _OPERANDS[node.op_type] if computes_integers(node) else range(len(node.inputs))
    values = [node.inputs[index] for index in operands if index < len(node.inputs)]
    return [str(value.name) for value in values if value is not None]


def packed(node: ir.Node) -> int:
    """Return how many parameters lie in one element of the weight of a node."""
    return 8 // node.attributes.get_int("bits", 4) if node.op_type == "MatMulNBits" else 1


def integer_weight(node: ir.Node) -> Array | None:
    """Return the weight of a node that computes in integers, zeros of its shape where it is packed."""
    if node.op_type == "MatMulNBits":
        sizes = [node.attributes[name].as_int() for name in ("K", "N")]
        return np.broadcast_to(np.int8(0), sizes)
    operands = _OPERANDS[node.op_type][: 2 if "MatMul" in node.op_type else 1]
    values = [node.inputs[index] for index in operands if index < len(node.inputs)]
    return next((weight for weight in map(constant, values) if weight is not None), None)


def constant(value: ir.Value | None, followed: Sequence[str] = ()) -> Array | None:
    """Return what a value always is, or None where it depends on the inputs.

    Constants that are only turned or reshaped on their way are followed.
    """
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    producer = value.producer()
    if producer is None or not is_standard(producer, *MOVING, *followed) or producer.graph is None:
        return None
    if any(operand is not None and constant(operand, followed) is None for operand in producer.inputs):
        return None
    graph = ir.convenience.extract(producer.graph, [], [value])
    graph.opset_imports[""] = max(_OPSET, graph.opset_imports.get("", 0))
    part = ir.Model(graph, ir_version=10)
    outputs: Any = ReferenceEvaluator(ir.to_proto(part)).run(None, {})
    return np.asarray(outputs[0])


def rounded_constant(value: ir.Value | None) -> Array | None:
    """Return the constant behind QuantizeLinear and DequantizeLinear, as the numbers that it stands for.

    Where they are of onnxruntime's own domain it is returned as it is stored.
    """
    array = constant(value, ("QuantizeLinear", "DequantizeLinear"))
    producer = None if value is None else value.producer()
    if array is None and producer is not None and (dequantises(producer) or quantises(producer)):
        return rounded_constant(producer.inputs[0])
    return array


def is_rounded(value: ir.Value | None) -> bool:
    """Tell whether a value comes out of a DequantizeLinear, turned or reshaped perhaps."""
    producer = None if value is None else value.producer()
    while producer is not None and is_standard(producer, *MOVING) and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    return producer is not None and dequantises(producer)
