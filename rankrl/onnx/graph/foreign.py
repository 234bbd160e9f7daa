"""Nodes of domains other than ONNX's own: what they compute is unknown, their weights are counted."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph_edits import Array
from rankrl.onnx.operators import MICROSOFT, is_standard


def foreign_weight(node: ir.Node) -> Array | None:
    """Return the weight that a node of a foreign domain holds, or None.

    It is the largest of its constants in floating point along two axes or more; biases and scales, along one,
    are none.
    """
    if is_standard(node):
        return None
    tensors = [ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point()]
    weights = [array for array in arrays if np.sum(np.array(array.shape) > 1) > 1]
    return max(weights, key=lambda array: array.size, default=None)


def is_foreign(node: ir.Node | None) -> bool:
    """Tell whether a node holds a weight without being an operator of ONNX."""
    return node is not None and foreign_weight(node) is not None


def foreign_reason(node: ir.Node) -> str:
    """Return why a node of a foreign domain stays as it is, and what to do about it."""
    if node.domain == MICROSOFT or node.domain.startswith(f"{MICROSOFT}."):
        return (
            f"it is onnxruntime's own {node.op_type} ({node.domain}); give the file from before onnxruntime "
            "optimised it"
        )
    return (
        f"it is no operator of ONNX but {node.op_type} of the domain {node.domain!r}; export the network to "
        "ONNX's own operators"
    )
