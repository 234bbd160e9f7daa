"""Weights that hold the rows of an identity, stored without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph_edits import Array, add_constant, names_in, new_name, node_of, put_first, stored
from rankrl.onnx.operators import is_standard


def store_pivoted(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Let the graph put together weights of pivoting factorisations, which a runtime does once, on loading.

    Args:
        model: The graph; changed in place.
        names: Constants (out, r, 1, ...) with all rows of an identity; of a matrix product they are turned.

    Returns:
        Names of the constants that hold the other rows, by those of the weights.
    """
    graph, taken = model.graph, names_in(model.graph)
    others_of: dict[str, str] = {}
    for name in names:
        value = graph.initializers[name]
        array = stored(value)
        assert array is not None
        turned = any(is_standard(node, "MatMul") for node, _ in value.uses())
        matrix = array.T if turned else array.reshape(array.shape[:2])
        rank = matrix.shape[1]
        first = _identity_rows(matrix)
        others = np.setdiff1d(np.arange(len(matrix)), first)

        def constant(kind: str, numbers: Array, name: str = name) -> ir.Value:
            return add_constant(graph, new_name(f"{name}_{kind}", taken), numbers)

        def node(op_type: str, inputs: Sequence[ir.Value], name: str = name, **attributes: int) -> ir.Node:
            return node_of(op_type, inputs, new_name(f"{name}_{op_type}", taken), attributes)

        zeros = node("ConstantOfShape", [constant("sizes", np.array([rank, rank]))])
        zeros.attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1, array.dtype))))
        identity = node("EyeLike", [zeros.outputs[0]])
        stored_rows = constant("rows", matrix[others])
        others_of[name] = str(stored_rows.name)
        rows = node("Concat", [identity.outputs[0], stored_rows], axis=0)
        order = np.concatenate([first, others]).argsort().astype(np.int32)
        nodes = [zeros, identity, rows, node("Gather", [rows.outputs[0], constant("order", order)], axis=0)]
        if turned:
            nodes.append(node("Transpose", [nodes[-1].outputs[0]]))
        elif array.ndim > 2:
            shape = constant("shape", np.array(array.shape))
            nodes.append(node("Reshape", [nodes[-1].outputs[0], shape]))
        value.replace_all_uses_with(nodes[-1].outputs[0])
        del graph.initializers[name]
        put_first(graph, nodes)
    return others_of


def _identity_rows(matrix: Array) -> Array:
    """Return for each row of the identity which row of a matrix (out, r) is the first that is the same."""
    units = np.flatnonzero(((matrix == 0) | (matrix == 1)).all(1) & (matrix.sum(1) == 1))
    places = matrix[units].argmax(1)
    return np.array([units[np.flatnonzero(places == column)[0]] for column in range(matrix.shape[1])])
