"""Hard swishes, x * HardSigmoid(x), between integers: a table of 256 numbers and a product of integers.

onnxruntime has neither in integers. But HardSigmoid(x) = clip(alpha * x + beta, 0, 1) in steps of 1 / 255 is
what rounding of alpha * x cuts off where its zero point is 255 * beta: the same integers read with a zero
point of 0. LeakyRelu with a slope of 1, which onnxruntime makes a table of (QLinearLeakyRelu), carries
integers from one scale to the other.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph_edits import new_constant, node_of, put_in_place, stored, without_unused
from rankrl.onnx.operators import dequantises, is_standard, quantises

_STEPS = 255
_SLOPE, _MIDDLE = 1 / 6, 0.5
"""Of the gate of HardSwish (ai.onnx, version 14)."""
_DEFAULTS = {"alpha": 0.2, "beta": 0.5}
"""Of HardSigmoid (ai.onnx, version 6)."""


def join_hard_swishes(model: ir.Model) -> int:
    """Write x * clip(x + a, 0, c) / c as x * HardSigmoid(x), as files of older operator sets have it."""
    joined = 0
    for node in list(model.graph):
        match = _product(node)
        if match is None:
            continue
        x, shift, limit = match
        name = str(node.name)
        gate = node_of("HardSigmoid", [x], f"{name}/gate", {"alpha": 1 / limit, "beta": shift / limit})
        put_in_place(model.graph, [node], [gate, node_of("Mul", [x, gate.outputs[0]], name)])
        joined += 1
    if joined:
        without_unused(model)
    return joined


def _product(node: ir.Node) -> tuple[ir.Value, float, float] | None:
    """Return x, a and c where a node computes x * clip(x + a, 0, c) / c, divided at the end or before."""
    whole = _divided(node)
    inner = node if whole is None else _producer(whole[0])
    if inner is None or not is_standard(inner, "Mul"):
        return None
    for x, other in (inner.inputs, reversed(inner.inputs)):
        divided = _divided(_producer(other)) if whole is None else (other, whole[1])
        clipped = None if divided is None else _producer(divided[0])
        if x is None or divided is None or clipped is None or not is_standard(clipped, "Clip"):
            continue
        low, high = (_number(value) for value in (*clipped.inputs[1:], None, None)[:2])
        added = _producer(clipped.inputs[0])
        if low != 0 or high is None or not np.isclose(high, divided[1]) or added is None:
            continue
        if is_standard(added, "Add") and x in added.inputs:
            shift = _number(added.inputs[1 - added.inputs.index(x)])
            if shift is not None and 0 <= shift <= high:
                return x, shift, high
    return None


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _divided(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """Return what a node divides by a number, and that number."""
    if node is None or not is_standard(node, "Div", "Mul"):
        return None
    for value, other in (node.inputs, reversed(node.inputs)):
        number = _number(other)
        if value is not None and number:
            return value, number if node.op_type == "Div" else 1 / number
        if node.op_type == "Div":
            break
    return None


def _number(value: ir.Value | None) -> float | None:
    """Return a number that is stored."""
    array = stored(value)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def tabulate_gates(graph: ir.Graph, before: Collection[str | None]) -> None:
    """Let HardSigmoid and HardSwish between integers compute in them."""
    for node in [node for node in graph if is_standard(node, "HardSigmoid", "HardSwish")]:
        rounded = _producer(node.inputs[0])
        readers = [use.node for use in node.outputs[0].uses()]
        between = rounded is not None and dequantises(rounded) and rounded.name not in before
        if not between or rounded is None or not readers or node.outputs[0].is_graph_output():
            continue
        if not all(quantises(reader) and reader.name not in before for reader in readers):
            continue
        if node.op_type == "HardSwish":
            table = _table(graph, rounded, _SLOPE, _MIDDLE, str(node.name))
            product = node_of("Mul", [node.inputs[0], table[-1].outputs[0]], f"{node.name}/product")
            put_in_place(graph, [node], [*table, product])
            continue
        alpha, beta = (node.attributes.get_float(key, number) for key, number in _DEFAULTS.items())
        if not 0 <= beta <= 1:
            continue
        table = _table(graph, rounded, alpha, beta, str(node.name))
        graph.insert_after(node, table)
        for reader in readers:
            for user in [use.node for use in reader.outputs[0].uses()]:
                user.outputs[0].replace_all_uses_with(table[-1].outputs[0])


def _table(graph: ir.Graph, rounded: ir.Node, alpha: float, beta: float, name: str) -> list[ir.Node]:
    """Return the nodes from the integers that a node turns to floats to HardSigmoid of them."""
    integers, scale, zero = rounded.inputs
    known = stored(scale)
    assert known is not None
    slope = new_constant(graph, f"{name}/slope", (known * alpha).astype(np.float32))
    step = new_constant(graph, f"{name}/step", np.float32(1 / _STEPS))
    middle, none = (
        new_constant(graph, f"{name}/{what}", np.uint8(number))
        for what, number in (("middle", round(_STEPS * beta)), ("none", 0))
    )
    turned = node_of("DequantizeLinear", [integers, slope, zero], f"{name}/turned")
    moved = node_of("LeakyRelu", [turned.outputs[0]], f"{name}/moved", {"alpha": 1.0})
    cut = node_of("QuantizeLinear", [moved.outputs[0], step, middle], f"{name}/cut")
    gate = node_of("DequantizeLinear", [cut.outputs[0], step, none], f"{name}/gate")
    return [turned, moved, cut, gate]
