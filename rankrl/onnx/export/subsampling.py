"""Shortcuts that take every second row and column and add channels of zeros, as one convolution.

Residual networks without parameters in their shortcuts (He et al. 2016, option A) subsample by slices and add
channels by padding. onnxruntime copies the tensor once for each of these nodes, element by element and out of
the layout that convolutions compute in, and computes what they are added to in floating point, since it pads
no integers. A 1x1 convolution with the same stride, whose weight picks each channel once, computes the same
in a fraction of the time, in integers too.

The weight is not stored: `EyeLike` makes it, a constant, so a runtime computes it once, on loading.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph_edits import (
    Array,
    add_constant,
    node_of,
    put_first,
    put_in_place,
    stored,
    without_unused,
)
from rankrl.onnx.operators import is_standard

_PREFIX = "rankrl_select_"
_MOST_CHANNELS = 64
"""Channels that are read at most: a convolution mixes all of them, and more are copied faster (as timed)."""
_FIRST_SPATIAL = 2
_RANK = 4


@dataclass
class _Chain:
    """Slices, and the padding behind them, that one convolution may replace."""

    nodes: list[ir.Node]
    strides: dict[int, int]
    before: int = 0
    after: int = 0


def convolve_subsampling(model: ir.Model) -> int:
    """Turn slices that subsample, and padding of channels behind them, into convolutions."""
    graph = model.graph
    made = 0
    for node in list(graph):
        if not is_standard(node, "Slice") or node.graph is not graph:  # taken out with one before
            continue
        chain, source = _chain(node), node.inputs[0]
        count = None if source is None else _channels(source)
        if chain is None or count is None or count > _MOST_CHANNELS:
            continue
        _replace(graph, chain, count)
        made += 1
    if made:
        without_unused(model)
    return made


def store_selections(model: ir.Model) -> bool:
    """Store the weights that `convolve_subsampling` lets a runtime make, for tools that want constants."""
    graph = model.graph
    weights = [node for node in graph if node.op_type == "Reshape" and _selects(node.outputs[0])]
    for reshape in weights:
        eye = reshape.inputs[0].producer()  # type: ignore[union-attr]
        rows, columns = stored(eye.inputs[0].producer().inputs[0])  # type: ignore[union-attr, misc]
        picked = np.eye(rows, columns, eye.attributes.get_int("k", 0), dtype=np.float32)  # type: ignore[union-attr]
        weight = add_constant(graph, str(reshape.outputs[0].name), picked[:, :, None, None])
        reshape.outputs[0].replace_all_uses_with(weight)
    if weights:
        without_unused(model)
    return bool(weights)


def selects(node: ir.Node) -> bool:
    """Return whether a node is a convolution that `convolve_subsampling` made."""
    return is_standard(node, "Conv") and _selects(node.inputs[1])


def _selects(value: ir.Value | None) -> bool:
    return value is not None and str(value.name).startswith(_PREFIX)


def _channels(value: ir.Value) -> int | None:
    """Return the number of channels of a float32 tensor with two spatial axes that says so."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != _RANK:
        return None
    count = value.shape[1]
    return count if isinstance(count, int) and count else None


def _chain(first: ir.Node) -> _Chain | None:
    """Return the chain that begins with a node, if that only subsamples."""
    strides = _strides(first)
    if strides is None:
        return None
    chain = _Chain([first], strides)
    while (node := _only_reader(chain.nodes[-1])) is not None:
        steps = _strides(node)
        if steps is not None and not steps.keys() & chain.strides.keys():
            chain.nodes.append(node)
            chain.strides |= steps
            continue
        zeros = _zero_channels(node)
        if zeros is not None:
            chain.nodes.append(node)
            chain.before, chain.after = zeros
        break
    return chain if any(step > 1 for step in chain.strides.values()) else None


def _only_reader(node: ir.Node) -> ir.Node | None:
    """Return the node that alone reads what a node makes; bodies and outputs of the graph read, too."""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not node.graph:
        return None
    return uses[0].node


def _strides(node: ir.Node) -> dict[int, int] | None:
    """Return the step along each axis of a slice from the axis' first position to its last."""
    if not is_standard(node, "Slice") or len(node.inputs) != 5:
        return None
    values = [_numbers(value) for value in node.inputs[1:]]
    if any(numbers is None for numbers in values):
        return None
    whole = np.iinfo(np.int32).max
    strides = {}
    for start, end, axis, step in zip(*values, strict=True):
        if start != 0 or end < whole or step < 1:
            return None
        axis = axis + _RANK if axis < 0 else axis
        if not _FIRST_SPATIAL <= axis < _RANK:
            return None
        strides[int(axis)] = int(step)
    return strides


def _zero_channels(node: ir.Node) -> tuple[int, int] | None:
    """Return how many channels of zeros a node adds before and after, if that is all it does."""
    if not is_standard(node, "Pad") or len(node.inputs) > 3:
        return None
    mode, pads = node.attributes.get_string("mode", "constant"), _numbers(node.inputs[1])
    filled = np.zeros(1) if len(node.inputs) < 3 or node.inputs[2] is None else _numbers(node.inputs[2])
    if mode != "constant" or pads is None or filled is None or filled.any() or len(pads) != 2 * _RANK:
        return None
    before, after = int(pads[1]), int(pads[_RANK + 1])
    others = [size for index, size in enumerate(pads) if index % _RANK != 1]
    return (before, after) if min(before, after) >= 0 and not any(others) else None


def _numbers(value: ir.Value | None) -> Array | None:
    array = stored(value)
    return None if array is None else array.reshape(-1)


def _replace(graph: ir.Graph, chain: _Chain, channels: int) -> None:
    """Put a convolution in the place of a chain that reads so many channels."""
    rows = chain.before + channels + chain.after
    weight = _weight(graph, rows, channels, -chain.before)
    strides = [chain.strides.get(axis, 1) for axis in range(_FIRST_SPATIAL, _RANK)]
    conv = node_of(
        "Conv",
        [chain.nodes[0].inputs[0], weight],
        f"{_PREFIX}{chain.nodes[-1].outputs[0].name}",
        {"kernel_shape": [1, 1], "strides": strides},
    )
    put_in_place(graph, chain.nodes, [conv])


def _weight(graph: ir.Graph, rows: int, columns: int, offset: int) -> ir.Value:
    """Return the weight (rows, columns, 1, 1) with ones on one diagonal, made in the graph."""
    base = f"{_PREFIX}{rows}_{columns}_{-offset}"
    made = next((node.outputs[0] for node in graph if node.outputs[0].name == base), None)
    if made is not None:
        return made
    plane = add_constant(graph, f"{base}_plane", np.array((rows, columns), np.int64))
    shape = add_constant(graph, f"{base}_shape", np.array((rows, columns, 1, 1), np.int64))
    zeros = node_of("ConstantOfShape", [plane], f"{base}_zeros")
    attributes = {"dtype": int(ir.DataType.FLOAT), "k": offset}
    eye = node_of("EyeLike", [zeros.outputs[0]], f"{base}_eye", attributes)
    weight = node_of("Reshape", [eye.outputs[0], shape], base)
    put_first(graph, [zeros, eye, weight])
    return weight.outputs[0]
