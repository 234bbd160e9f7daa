"""Products with a one-hot code as look-ups: the same numbers without comparing, casting and multiplying.

Exporters write an embedding of integers as a comparison of every index with every class, and a matrix
product of the result. Such a product picks a row of its weight. What follows element by element, a bias or an
activation of many nodes, is a function of that row alone and goes into the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from rankrl.onnx.graph.network import GraphSession, OnnxNetwork
from rankrl.onnx.graph.quantised import constant
from rankrl.onnx.graph_edits import (
    Array,
    free_ends,
    free_name,
    new_constant,
    part_of,
    put_in_place,
    without_unused,
)
from rankrl.onnx.operators import is_standard

# fmt: off
_ELEMENTWISE = {
    "Abs", "Add", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid",
    "Softplus", "Softsign", "Sqrt", "Sub", "Tanh",
}
# fmt: on


@dataclass(frozen=True)
class _OneHot:
    """A one-hot code along the last axis."""

    index: ir.Value
    classes: int


def with_look_ups(network: OnnxNetwork) -> OnnxNetwork:
    """Return a network in which products with a one-hot code are look-ups; the same one if it has none.

    Outputs stay the same for every input, indices of no class included.
    """
    model = network.graph_model()
    products = [node for node in model.graph if is_standard(node, "MatMul") and _one_hot(node.inputs[0])]
    if not products:
        return network
    passes.ShapeInferencePass()(model)
    replaced = [_replace(model, product, network.source) for product in products]
    if not any(replaced):
        return network
    return network.rewritten(without_unused(model))


def _replace(model: ir.Model, product: ir.Node, source: str) -> bool:
    """Put a look-up in the place of a product, if that is one with a one-hot code; tell whether it was."""
    code, weight = _one_hot(product.inputs[0]), constant(product.inputs[1])
    if code is None or weight is None or weight.dtype != np.float32:
        return False
    axes = product.outputs[0].shape
    if weight.ndim != 2 or len(weight) != code.classes or axes is None or code.index.shape is None:
        return False
    if len(code.index.shape) != len(axes):
        return False
    graph, name = model.graph, f"{product.name}/look_up"
    old = _function_of_row(graph, product.outputs[0], weight.shape[1], len(axes))
    none = np.zeros((1, weight.shape[1]), np.float32)
    table = _mapped(model, product.outputs[0], old, np.concatenate([weight, none]), source)
    # The last row is that of no class: a larger index is cut to it, a negative one counts from behind.
    constants = {"axis": [-1], "least": -1, "most": code.classes}
    axis, least, most = (
        new_constant(graph, f"{name}.{key}", np.array(value, np.int64)) for key, value in constants.items()
    )
    nodes = [ir.node("Squeeze", [code.index, axis], name=f"{name}_squeeze")]
    nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(ir.DataType.INT64)}, name=f"{name}_cast"))
    nodes.append(ir.node("Clip", [nodes[-1].outputs[0], least, most], name=f"{name}_clip"))
    rows = new_constant(graph, f"{name}.table", table)
    nodes.append(ir.node("Gather", [rows, nodes[-1].outputs[0]], {"axis": 0}, name=name))
    for node in nodes:
        node.outputs[0].name = free_name(graph, f"{node.name}_output")
    last = old.producer()
    assert last is not None
    put_in_place(graph, [last], nodes)
    return True


def _one_hot(value: ir.Value | None) -> _OneHot | None:
    """Return what a value is the one-hot code of: a comparison with 0, 1, 2, ... along the last axis."""
    producer = None if value is None else value.producer()
    while producer is not None and is_standard(producer, "Cast") and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    if producer is None or not is_standard(producer, "Equal"):
        return None
    for index, other in (producer.inputs, producer.inputs[::-1]):
        classes = constant(other)
        if index is None or classes is None or classes.dtype.kind not in "iu" or classes.size < 2:
            continue
        last = classes.ndim > 0 and classes.shape[-1] == classes.size
        if last and np.array_equal(classes.reshape(-1), np.arange(classes.size)):
            return _OneHot(index, classes.size)
    return None


def _function_of_row(graph: ir.Graph, product: ir.Value, width: int, axes: int) -> ir.Value:
    """Return the last value that the elements of a product alone determine, one by one.

    What lies between is used for nothing else.
    """
    sources: dict[ir.Value, set[ir.Value]] = {product: set()}  # of each, the ones that it is computed from
    for node in graph:
        others = [value for value in node.inputs if value is not None and value not in sources]
        inside = {value for value in node.inputs if value is not None and value in sources}
        if (
            inside
            and is_standard(node, *_ELEMENTWISE)
            and all(_along_row(value, width, axes) for value in others)
        ):
            sources[node.outputs[0]] = inside.union(*(sources[value] for value in inside))
    for value, within in reversed(sources.items()):
        if all(_only_within(inner, within | {value}) for inner in within):
            return value
    return product


def _along_row(value: ir.Value, width: int, axes: int) -> bool:
    """Tell whether a value is one constant, or one for each element of a row, that adds no axes."""
    array = constant(value)
    if array is None or array.ndim > axes:
        return False
    return array.size == 1 or (array.size == width and array.shape[-1] == width)


def _only_within(value: ir.Value, values: set[ir.Value]) -> bool:
    """Tell whether a value is used for nothing but some others."""
    return not value.is_graph_output() and all(use.node.outputs[0] in values for use in value.uses())


def _mapped(model: ir.Model, start: ir.Value, end: ir.Value, rows: Array, source: str) -> Array:
    """Return what a graph makes of rows between two of its values."""
    if start is end:
        return rows
    part = part_of(model, [str(start.name)], [str(end.name)])
    free_ends(part)
    for value in (value for node in part.graph for value in node.outputs):
        value.shape = None  # there are other axes in front
    mapped = GraphSession(part, source).run({str(start.name): rows})[0]
    return mapped.reshape(rows.shape)
