"""Which nodes of a graph compute in integers where some weights do, and how more of them can.

Specification: the kernels of onnxruntime's processor provider, QLinearAdd, QLinearMul, QLinearSigmoid,
QLinearGlobalAveragePool and the like (ContribOperators.md), and operators that move integers.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.subsampling import selects
from rankrl.onnx.graph_edits import is_constant, node_of, put_in_place, stored
from rankrl.onnx.operators import is_standard

# What only moves, adds or compares integers is integer where all that it takes is.
_PASSING = frozenset(
    ("Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Flatten")
) | {"Transpose", "Squeeze", "Unsqueeze", "Slice", "Pad", "LeakyRelu", "Resize"}
_COMPUTING = frozenset(("Conv", "Gemm", "MatMul"))
_GATES = frozenset(("Sigmoid", "HardSigmoid"))
_BETWEEN = frozenset(("HardSwish", "Gelu", "Mish"))
"""Activations without an integer kernel."""
_IMAGE = 4
"""Axes of a batch of images."""


def integer_nodes(graph: ir.Graph, weights: Collection[str]) -> list[ir.Node]:
    """Return the nodes that compute in integers: those of some weights, and what lies between them.

    A pooling, reshape or the like is one of them where its input is the output of such a node; an addition,
    too, where one summand is and the other at least is the input of a weight's node, as it is or subsampled.
    A convolution of groups, which plans do not name, is where its input is. A product is where one factor is,
    and the other is, too, or is a gate (a sigmoid); a sigmoid where nothing but products reads it, since the
    steps of a probability are too coarse for an output. An activation without an integer kernel between
    integers is rounded again for means, sums, products and convolutions of groups.
    """
    owners = [
        (value.name, node)
        for node in graph
        if is_standard(node, *_COMPUTING)
        for value in node.inputs
        if value is not None and value.name in weights
    ]
    missing = sorted(set(weights) - {name for name, _ in owners})
    if missing:
        raise ExportError(
            f"the weight {missing[0]!r} belongs to no convolution or matrix product of the graph, so "
            "nothing can compute with it in integers; leave its layer without Quantise"
        )
    nodes = {node for _, node in owners}
    produced = {value for _, node in owners for value in node.outputs}
    between = set[ir.Value]()
    taken = {node.inputs[0] for _, node in owners}
    summands = {(node.inputs[0], node.inputs[1]) for node in graph if is_standard(node, "Add")}
    added_to = dict(summands) | {second: first for first, second in summands}
    for node in graph:  # in topological order
        inputs = {value for value in node.inputs if value is not None and not is_constant(value)}
        if is_standard(node, *_BETWEEN) and inputs <= produced:
            between.update(node.outputs)
            continue
        if selects(node):
            passes = inputs <= produced or (inputs <= taken and added_to.get(node.outputs[0]) in produced)
        elif _is_grouped(node):
            passes = inputs <= produced | between
        elif is_standard(node, "Mul"):
            factors = {value for value in inputs if not _is_gate(value)} or inputs
            passes = len(inputs) > 1 and factors <= produced | between
        elif is_standard(node, "Sigmoid"):
            passes = inputs <= produced and _is_gate(node.outputs[0])
        else:
            known = produced | taken | between if is_standard(node, "Add") else produced
            passes = is_standard(node, *_PASSING) and bool(inputs & produced) and inputs <= known
            passes = passes and not clips_zero(node)
            passes = passes or (is_standard(node, "GlobalAveragePool") and inputs <= between)
        if passes:
            nodes.add(node)
            produced.update(node.outputs)
    return [node for node in graph if node in nodes]


def clips_zero(node: ir.Node) -> bool:
    """Tell whether a node clips numbers to a range without zero, as far as is known.

    The quantiser leaves a `Clip` to the range of its output, which always holds zero.
    """
    if not is_standard(node, "Clip"):
        return False
    bounds = [None if value is None else stored(value) for value in node.inputs[1:3]]
    known = all(bound is not None for bound, value in zip(bounds, node.inputs[1:3], strict=True) if value)
    low, high = (*bounds, None, None)[:2]
    return not known or bool(low is not None and low > 0) or bool(high is not None and high < 0)


def _is_grouped(node: ir.Node) -> bool:
    """Tell whether a node is a convolution of several groups, each channel by itself most often."""
    return (
        is_standard(node, "Conv") and node.attributes.get_int("group", 1) > 1 and is_constant(node.inputs[1])
    )


def _is_gate(value: ir.Value) -> bool:
    """Tell whether a value is a sigmoid that nothing but products reads."""
    producer, uses = value.producer(), list(value.uses())
    if producer is None or not is_standard(producer, *_GATES) or value.is_graph_output():
        return False
    return bool(uses) and all(is_standard(use.node, "Mul") for use in uses)


def pool_means(model: ir.Model) -> int:
    """Turn means over the rows and columns of images into poolings, which there are in integers."""
    means = [node for node in model.graph if is_standard(node, "ReduceMean") and _is_pooling(node)]
    for node in means:
        pooling = node_of("GlobalAveragePool", [node.inputs[0]], str(node.name), {})
        put_in_place(model.graph, [node], [pooling])
    return len(means)


def _is_pooling(node: ir.Node) -> bool:
    value = node.inputs[0]
    if value is None or value.shape is None or len(value.shape) != _IMAGE:
        return False
    if len(node.inputs) > 1:
        array = stored(node.inputs[1])
        axes = [] if array is None else array.reshape(-1).tolist()
    else:
        axes = list(node.attributes.get_ints("axes", ()))
    keeps = node.attributes.get_int("keepdims", 1) == 1
    return keeps and sorted(axis % _IMAGE for axis in axes) == [_IMAGE - 2, _IMAGE - 1]
