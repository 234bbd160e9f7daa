"""Query and edit onnx_ir graphs: operators, names, constants, parts of graphs.

Operators are identified by domain and name: the `Conv` of another domain need not be ONNX's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

STANDARD = ("", "ai.onnx")
"""Names of the domain of ONNX's own operators in files."""
MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's, in which it has variants of ONNX's quantising operators."""


def opset_of(model: ir.Model) -> int:
    """Return the version of ONNX's own operator set in a model, 0 where none is stated."""
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


Array = np.ndarray[Any, np.dtype[Any]]


def values_in(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values that a graph defines itself; an input with a default comes twice."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def names_in(graph: ir.Graph) -> set[str]:
    taken = {str(node.name) for node in graph.all_nodes()}
    return taken | {str(value.name) for part in (graph, *graph.subgraphs()) for value in values_in(part)}


def new_name(name: str, taken: set[str]) -> str:
    """Return a name like the wanted one that is not taken, and take it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def free_name(graph: ir.Graph, name: str) -> str:
    """Return a name that no value and no node of the graph and its bodies has yet."""
    return new_name(name, names_in(graph))


def is_constant(value: ir.Value | None) -> bool:
    """Tell whether a value is stored in the graph and not the default of an input."""
    return value is not None and value.is_initializer() and not value.is_graph_input()


def stored(value: ir.Value | None) -> Array | None:
    """Return the stored numbers of a constant, None where the graph computes or takes the value."""
    if value is None or not is_constant(value) or value.const_value is None:
        return None
    return value.const_value.numpy()


def add_constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Store an array in a graph, under a name that is free; return its value."""
    value = ir.val(name, const_value=ir.tensor(np.asarray(array, order="C"), name=name))
    graph.register_initializer(value)
    return value


def new_constant(graph: ir.Graph, name: str, values: npt.ArrayLike) -> ir.Value:
    """Store numbers in a graph, under a name like the wanted one that is free; return their value."""
    return add_constant(graph, free_name(graph, name), np.asarray(values))


def node_of(
    op_type: str, inputs: Sequence[ir.Value | None], name: str, attributes: Mapping[str, Any] | None = None
) -> ir.Node:
    """Return a node of ONNX's own domain with one output; both get `name`, which must be free."""
    return ir.node(op_type, inputs, attributes, name=name, outputs=[ir.val(name)])


def put_in_place(graph: ir.Graph, old: Sequence[ir.Node], new: Sequence[ir.Node]) -> None:
    """Replace nodes by others in a row; the output of the last replaces the output of the old ones."""
    before, after = old[-1].outputs[0], new[-1].outputs[0]
    known = before.name, before.type, before.shape
    ir.convenience.replace_nodes_and_values(graph, old[-1], old, new, [before], [after])
    after.name, after.type, after.shape = known


def put_first(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    if nodes:
        graph.insert_before(graph[0], nodes)


def part_of(model: ir.Model, inputs: Sequence[ir.Value | str], outputs: Sequence[str]) -> ir.Model:
    """Return the part of a model between some values of its main graph; the model is left as it was."""
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def until(model: ir.Model, values: Sequence[str]) -> ir.Model:
    """Return the part of a model that computes some values, which become its outputs."""
    return part_of(model, list(model.graph.inputs), values)


def free_ends(model: ir.Model) -> None:
    """Set the inputs and outputs of a graph to float32 of any shape."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), None


def set_types(part: ir.Model, values: Mapping[str, Array]) -> None:
    """Set the types of inputs to those of values, with free sizes: the file's may be of another batch."""
    for entry in part.graph.inputs:
        value = values[str(entry.name)]
        entry.type = ir.TensorType(ir.DataType.from_numpy(value.dtype))
        entry.shape = ir.Shape([None] * value.ndim)


def depending(graph: ir.Graph, values: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values of a graph that depend on the given ones, these included."""
    reached = {value for value in values if not value.is_initializer()}
    for node in graph:  # in topological order
        if any(value in reached for value in used_by(node, graph)):
            reached.update(node.outputs)
    return reached


def producing(graph: ir.Graph, values: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes of a graph that some of its values depend on."""
    nodes: set[ir.Node] = set()
    left = list(values)
    while left:
        node = left.pop().producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += used_by(node, graph)
    return nodes


def used_by(node: ir.Node, graph: ir.Graph) -> list[ir.Value]:
    """Return the values of the main graph that a node or its bodies read."""
    values = [value for value in node.inputs if value is not None]
    for inner in (inner for body in bodies_of(node) for inner in body.all_nodes()):
        values += [value for value in inner.inputs if value is not None and value.graph is graph]
    return values


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs that a node runs (If, Loop, Scan)."""
    kinds = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS
    held = [attribute for attribute in node.attributes.values() if attribute.type in kinds]
    return [body for one in held for body in ([one.as_graph()] if one.type == kinds[0] else one.as_graphs())]


def without_unused(model: ir.Model) -> ir.Model:
    """Remove constants and nodes that nothing uses any more, in place; return the model."""
    padding = [(node, len(node.inputs)) for node in model.graph if is_standard(node, "Pad")]
    passes.RemoveUnusedNodesPass()(model)
    for node, count in padding:
        # The pass drops an empty last input, and then onnxruntime takes the zeros into the next convolution:
        # one of 64 x 1 takes three times as long.
        node.resize_inputs(count)
    return model
