"""Biases that take up the mean error of integers (Nagel et al., ICCV 2019, section 4.2).

Rounding a weight, and cutting off what its input is, move the mean of every output channel. The move is
measured node by node, on the inputs that the node has in floating point, and subtracted from its bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from rankrl.onnx.export.ranges import Array, Feed, tensors_of
from rankrl.onnx.graph_edits import add_constant, free_ends, node_of, part_of, stored, without_unused
from rankrl.onnx.operators import dequantises, is_standard, quantises
from rankrl.onnx.protobuf import to_proto
from rankrl.onnx.runtimes.onnxruntime_cpu import inference_session

_GIVEN = "_given"
_LIMITS = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def mean_moves(plain: ir.Model, quantised: ir.Model, inputs: Iterable[Feed]) -> dict[str, Array]:
    """Return how far integers move the mean of every output channel, by the names of nodes' outputs."""
    cut = quantised.clone()
    nodes = _corrected_nodes(plain.graph, cut.graph)
    if not nodes:
        return {}
    part, taken = _cut_before_rounding(cut, list(nodes.values()))
    session = inference_session(to_proto(part).SerializeToString(), 1)
    run = tensors_of(to_proto(plain), dict.fromkeys([*taken, *nodes]))
    sums: dict[str, Array | float] = dict.fromkeys(nodes, 0.0)
    count = 0
    for feed in inputs:
        values = run(feed)
        rounded = session.run(None, {f"{name}{_GIVEN}": values[name] for name in taken})
        for (name, node), output in zip(nodes.items(), rounded, strict=True):
            sums[name] = sums[name] + _channel_means(node, output) - _channel_means(node, values[name])
        count += 1
    return {name: np.asarray(total / max(1, count)) for name, total in sums.items()}


def correct_biases(plain: ir.Model, quantised: ir.Model, moves: Mapping[str, Array]) -> None:
    """Let biases make up for what integers do to the means of nodes."""
    for name, node in _corrected_nodes(plain.graph, quantised.graph).items():
        if name in moves:
            _subtract(quantised.graph, node, moves[name])
    without_unused(quantised)  # onnxruntime would turn the biases that are replaced back in every pass


def _subtract(graph: ir.Graph, node: ir.Node, move: Array) -> None:
    """Subtract from the bias of a node, which is in floating point or in integers with a scale."""
    name, bias = f"{node.name}bias", node.inputs[2]  # free: no other name in the copy ends like this
    values = stored(bias)
    if values is not None:
        node.replace_input_with(2, add_constant(graph, name, (values - move).astype(np.float32)))
        return
    rounded = bias.producer() if bias is not None else None
    assert rounded is not None
    integers, scale = map(stored, rounded.inputs[:2])
    assert integers is not None
    assert scale is not None
    steps = np.round(integers - move / scale.astype(np.float64)).clip(*_LIMITS).astype(np.int32)
    inputs = [add_constant(graph, name, steps), *rounded.inputs[1:]]
    turned = node_of("DequantizeLinear", inputs, f"{name}_DequantizeLinear", dict(rounded.attributes))
    graph.insert_before(node, turned)
    node.replace_input_with(2, turned.outputs[0])


def _corrected_nodes(plain: ir.Graph, quantised: ir.Graph) -> dict[str, ir.Node]:
    """Return the nodes with a bias that compute in integers, by the names of their outputs in floats."""
    integer = {node.name: node for node in quantised if _rounding(node) is not None}
    return {
        str(node.outputs[0].name): integer[node.name]
        for node in plain
        if is_standard(node, "Conv", "Gemm")
        and len(node.inputs) > 2
        and stored(node.inputs[2]) is not None
        and node.name in integer
    }


def _rounding(node: ir.Node) -> ir.Node | None:
    """Return the node that rounds what a node takes, `None` where it takes floats."""
    back = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if back is None or not dequantises(back) or back.inputs[0] is None:
        return None
    rounding = back.inputs[0].producer()
    return rounding if rounding is not None and quantises(rounding) else None


def _cut_before_rounding(model: ir.Model, nodes: Sequence[ir.Node]) -> tuple[ir.Model, list[str]]:
    """Return what gives the outputs of nodes from what they round, and the names of these tensors."""
    taken: dict[ir.Value, ir.Value] = {}
    for rounding in dict.fromkeys(filter(None, map(_rounding, nodes))):
        value = rounding.inputs[0]
        assert value is not None
        entry = taken.setdefault(value, ir.val(f"{value.name}{_GIVEN}", ir.DataType.FLOAT))
        rounding.replace_input_with(0, entry)
    model.graph.inputs.extend(taken.values())
    part = part_of(model, list(taken.values()), [str(node.outputs[0].name) for node in nodes])
    free_ends(part)
    return part, [str(value.name) for value in taken]


def _channel_means(node: ir.Node, output: Array) -> Array:
    """Return the mean of every output channel."""
    channels = 1 if node.op_type == "Conv" else -1
    rows = np.moveaxis(output, channels, 0)
    means: Array = rows.reshape(len(rows), -1).mean(1, dtype=np.float64)
    return means
