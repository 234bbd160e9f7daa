"""Shortcuts that take every second row and column and add channels of zeros, as one convolution.

Residual networks without parameters in their shortcuts (He et al. 2016, option A) subsample by slices and add
channels by padding. onnxruntime copies the tensor once for each of these nodes, element by element and out of
the layout that convolutions compute in, and computes what they are added to in floating point, since it pads
no integers. A 1x1 convolution with the same stride, whose weight picks each channel once, computes the same
in a fraction of the time, in integers too.

The weight is not stored: `EyeLike` makes it, a constant, so a runtime computes it once, on loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rankrl.onnx.export.graph import remove_unused_constants
from rankrl.onnx.export.operators import is_standard
from rankrl.onnx.export.values import uses

_PREFIX = "rankrl_select_"
_MOST_CHANNELS = 64
"""Channels that are read at most: a convolution mixes all of them, and more are copied faster (as timed)."""
_FIRST_SPATIAL = 2
_RANK = 4


@dataclass
class _Chain:
    """Slices, and the padding behind them, that one convolution may replace.

    Attributes:
        nodes: They in order, of which each alone reads the one before.
        strides: Step along rows and columns.
        before: Channels of zeros in front of those that are read.
        after: Channels of zeros behind them.
    """

    nodes: list[onnx.NodeProto]
    strides: dict[int, int]
    before: int = 0
    after: int = 0


def convolve_subsampling(model: onnx.ModelProto) -> int:
    """Turn slices that subsample, and padding of channels behind them, into convolutions.

    Args:
        model: Changed in place. Tensors whose number of channels is not known, that are no float32 of two
            spatial axes, or have more than 64 channels, stay as they are.

    Returns:
        How many convolutions were made.
    """
    graph = model.graph
    constants = {each.name: each for each in graph.initializer}
    channels = _channels(graph)
    counts = uses(graph)
    readers = {name: node for node in graph.node for name in node.input}
    made, done = 0, set[str]()
    for node in list(graph.node):
        if not is_standard(node, "Slice") or node.output[0] in done:
            continue
        count = channels.get(node.input[0], _MOST_CHANNELS + 1)
        chain = _chain(node, readers, counts, constants)
        if chain is None or count > _MOST_CHANNELS:
            continue
        done.update(each.output[0] for each in chain.nodes)
        _replace(graph, chain, count)
        made += 1
    if made:
        remove_unused_constants(graph)
    return made


def store_selections(model: onnx.ModelProto) -> bool:
    """Store the weights that `convolve_subsampling` lets a runtime make, for tools that want constants.

    Args:
        model: Changed in place.

    Returns:
        Whether there are any.
    """
    graph = model.graph
    nodes = {node.output[0]: node for node in graph.node if node.output[0].startswith(_PREFIX)}
    own = [each for each in graph.initializer if each.name.startswith(_PREFIX)]
    sizes = {each.name: numpy_helper.to_array(each) for each in own}
    weights = [name for name, node in nodes.items() if node.op_type == "Reshape"]
    for name in weights:
        eye = nodes[nodes[name].input[0]]
        offset = next(each.i for each in eye.attribute if each.name == "k")
        rows, columns = sizes[nodes[eye.input[0]].input[0]]
        picked = np.eye(rows, columns, offset, dtype=np.float32)
        graph.initializer.append(numpy_helper.from_array(picked[:, :, None, None], name))
    for node in nodes.values():
        graph.node.remove(node)
    if weights:
        remove_unused_constants(graph)
    return bool(weights)


def selects(node: onnx.NodeProto) -> bool:
    """Return whether a node is a convolution that `convolve_subsampling` made."""
    return is_standard(node, "Conv") and node.input[1].startswith(_PREFIX)


def _channels(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the number of channels of each float32 tensor with two spatial axes that says so."""
    known = {}
    for value in (*graph.input, *graph.value_info):
        kind = value.type.tensor_type
        axes = kind.shape.dim
        if kind.elem_type == onnx.TensorProto.FLOAT and len(axes) == _RANK and axes[1].dim_value:
            known[value.name] = axes[1].dim_value
    return known


def _chain(
    first: onnx.NodeProto,
    readers: Mapping[str, onnx.NodeProto],
    counts: Counter[str],
    constants: Mapping[str, onnx.TensorProto],
) -> _Chain | None:
    """Return the chain that begins with a node, if that only subsamples."""
    strides = _strides(first, constants)
    if strides is None:
        return None
    chain = _Chain([first], strides)
    while counts[chain.nodes[-1].output[0]] == 1 and chain.nodes[-1].output[0] in readers:
        node = readers[chain.nodes[-1].output[0]]
        further = _strides(node, constants)
        if further is not None and not further.keys() & chain.strides.keys():
            chain.nodes.append(node)
            chain.strides |= further
            continue
        zeros = _zero_channels(node, constants)
        if zeros is not None:
            chain.nodes.append(node)
            chain.before, chain.after = zeros
        break
    return chain if any(step > 1 for step in chain.strides.values()) else None


def _strides(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> dict[int, int] | None:
    """Return the step along each axis of a slice from the axis' first position to its last."""
    if not is_standard(node, "Slice") or len(node.input) != 5:
        return None
    values = [_values(name, constants) for name in node.input[1:]]
    if any(each is None for each in values):
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


def _zero_channels(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> tuple[int, int] | None:
    """Return how many channels of zeros a node adds before and after, if that is all it does."""
    if not is_standard(node, "Pad") or len(node.input) > 3:
        return None
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    pads = _values(node.input[1], constants)
    filled = _values(node.input[2], constants) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    if mode != b"constant" or pads is None or filled is None or filled.any() or len(pads) != 2 * _RANK:
        return None
    before, after = int(pads[1]), int(pads[_RANK + 1])
    others = [size for index, size in enumerate(pads) if index % _RANK != 1]
    return (before, after) if min(before, after) >= 0 and not any(others) else None


def _values(name: str, constants: Mapping[str, onnx.TensorProto]) -> np.ndarray[Any, Any] | None:
    return numpy_helper.to_array(constants[name]).reshape(-1) if name in constants else None


def _replace(graph: onnx.GraphProto, chain: _Chain, channels: int) -> None:
    """Put a convolution in the place of a chain that reads so many channels."""
    source, target = chain.nodes[0].input[0], chain.nodes[-1].output[0]
    rows = chain.before + channels + chain.after
    weight = _weight(graph, rows, channels, -chain.before)
    strides = [chain.strides.get(axis, 1) for axis in range(_FIRST_SPATIAL, _RANK)]
    conv = helper.make_node(
        "Conv", [source, weight], [target], f"{_PREFIX}{target}", kernel_shape=[1, 1], strides=strides
    )
    position = list(graph.node).index(chain.nodes[-1])
    graph.node.insert(position, conv)
    for node in chain.nodes:
        graph.node.remove(node)


def _weight(graph: onnx.GraphProto, rows: int, columns: int, offset: int) -> str:
    """Return the name of the weight (rows, columns, 1, 1) with ones on one diagonal, made in the graph."""
    base = f"{_PREFIX}{rows}_{columns}_{-offset}"
    if any(base in node.output for node in graph.node):
        return base
    plane, shape = f"{base}_plane", f"{base}_shape"
    for name, sizes in ((plane, (rows, columns)), (shape, (rows, columns, 1, 1))):
        graph.initializer.append(numpy_helper.from_array(np.array(sizes, dtype=np.int64), name))
    zeros, eye = f"{base}_zeros", f"{base}_eye"
    steps = (
        helper.make_node("ConstantOfShape", [plane], [zeros], zeros),
        helper.make_node("EyeLike", [zeros], [eye], eye, dtype=onnx.TensorProto.FLOAT, k=offset),
        helper.make_node("Reshape", [eye, shape], [base], base),
    )
    for position, node in enumerate(steps):
        graph.node.insert(position, node)
    return base
