"""Pad the channels of convolutions with zeros to numbers that onnxruntime computes fast.

Its fast convolutions on x86-64 compute blocks of 16 channels with AVX-512 and of 8 with AVX2 (the NCHWc
layout of its library MLAS). They round channels up to whole blocks, but only numbers that are multiples of 4,
and what reads fewer than a block is not computed in blocks: between layers of 16 channels at 32 x 32 a
depthwise convolution of 14 or 30 takes three to four times as long as one of 16 or 32. Decomposed layers have
such ranks, pruned ones such widths.

The zeros are not stored: a `Pad` node makes the larger weight of the stored one. Both are constant, so a
runtime computes it once, on loading. Outputs are the same up to the order of sums: whatever the new channels
hold is multiplied by zeros where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph_edits import add_constant, is_constant, is_standard, node_of, opset_of, put_first

_LEAST_OPSET = 11  # the first in which Pad takes its sizes as an input
_ALIGNMENT = 4  # of channels that are computed in blocks, whatever the block
_PREFIX = "rankrl_pad_"
_ELEMENTWISE = frozenset(
    ("Relu", "LeakyRelu", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Sigmoid", "Softplus", "Tanh")
)
"""Operators that compute every channel by itself and take nothing else but constants."""
_POOLING = frozenset(("MaxPool", "AveragePool", "GlobalAveragePool"))
_JOINING = frozenset(("Add", "Mul"))


@dataclass
class _Channels:
    """Tensors that share their channels: outputs of convolutions and what follows them channel by channel."""

    counts: set[int] = field(default_factory=set)
    writers: list[ir.Node] = field(default_factory=list)
    readers: list[ir.Node] = field(default_factory=list)
    values: set[ir.Value] = field(default_factory=set)
    depthwise: bool = False
    fixed: bool = False

    def take(self, other: _Channels) -> None:
        """Merge another set of channels into this one."""
        self.counts |= other.counts
        self.writers += other.writers
        self.readers += other.readers
        self.values |= other.values
        self.depthwise |= other.depthwise
        self.fixed |= other.fixed

    def missing(self, block: int) -> int:
        """Return the number of channels to add, 0 where padding is impossible or would take more time."""
        if self.fixed or len(self.counts) != 1:
            return 0
        (count,) = self.counts
        # It pays where at most three eighths of the computed channels are zeros, three quarters with a
        # depthwise convolution among them, as measured (docs/benchmarks.md).
        computed = -(-count // block) * block
        pays = 4 * count > block if self.depthwise else 8 * count >= 5 * computed
        return max(block, -(-count // _ALIGNMENT) * _ALIGNMENT) - count if pays else 0


def pad_channels(model: ir.Model, block: int) -> int:
    """Fill up channels between convolutions of two axes with zeros where that takes less time."""
    graph = model.graph
    if block < 2 or opset_of(model) < _LEAST_OPSET or any(True for _ in graph.subgraphs()):
        return 0
    rows, columns = dict[ir.Node, int](), dict[ir.Node, int]()
    for channels in _channels(graph):
        missing = channels.missing(block)
        if missing:
            rows |= dict.fromkeys(channels.writers, missing)
            columns |= dict.fromkeys(channels.readers, missing)
            for value in channels.values:
                value.shape = value.type = None
    pads = _Pads(graph)
    for conv in [node for node in graph if node in rows or node in columns]:
        _pad_operands(conv, rows.get(conv, 0), columns.get(conv, 0), pads)
    put_first(graph, list(pads.nodes.values()))
    return len(rows)


def unpad_channels(model: ir.Model) -> bool:
    """Undo `pad_channels`, for tools that want to find the weights of convolutions as constants."""
    graph = model.graph
    sizes = {name: value for name, value in graph.initializers.items() if name.startswith(_PREFIX)}
    padding = [
        node
        for node in graph
        if is_standard(node, "Pad") and len(node.inputs) == 2 and node.inputs[1] in sizes.values()
    ]
    for node in padding:
        source, pads = node.inputs
        assert pads is not None
        assert pads.const_value is not None
        added = pads.const_value.numpy()
        for conv, index in node.outputs[0].uses():
            conv.replace_input_with(index, source)
            if index == 1:
                _widen_groups(conv, -int(added[len(added) // 2]))
    graph.remove(padding, safe=True)
    for name in sizes:
        del graph.initializers[name]
    return bool(padding)


@dataclass
class _Pads:
    """The nodes that make larger weights, one for each weight and size."""

    graph: ir.Graph
    nodes: dict[tuple[ir.Value, tuple[int, ...]], ir.Node] = field(default_factory=dict)
    sizes: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)

    def padded(self, value: ir.Value, added: tuple[int, ...]) -> ir.Value:
        """Return a constant padded with `added` zeros at the end of each axis."""
        if not any(added):
            return value
        if added not in self.sizes:
            pads = np.array([*[0] * len(added), *added], dtype=np.int64)
            words = "_".join(map(str, added))
            self.sizes[added] = add_constant(self.graph, f"{_PREFIX}by_{words}", pads)
        if (value, added) not in self.nodes:
            name = f"{_PREFIX}{len(self.nodes)}"  # short: there are three in every layer
            self.nodes[value, added] = node_of("Pad", [value, self.sizes[added]], name)
        return self.nodes[value, added].outputs[0]


def _pad_operands(conv: ir.Node, rows: int, columns: int, pads: _Pads) -> None:
    """Add `rows` output channels and `columns` input channels of zeros to a convolution."""
    _, weight, *bias = conv.inputs
    assert weight is not None
    conv.replace_input_with(1, pads.padded(weight, (rows, columns, 0, 0)))
    if bias and bias[0] is not None:
        conv.replace_input_with(2, pads.padded(bias[0], (rows,)))
    _widen_groups(conv, rows)


def _widen_groups(conv: ir.Node, added: int) -> None:
    """Add groups to a depthwise convolution; one of a single group keeps that."""
    groups = conv.attributes.get_int("group", 1)
    if groups > 1:
        conv.attributes["group"] = ir.AttrInt64("group", groups + added)


def _channels(graph: ir.Graph) -> Iterable[_Channels]:
    """Return the sets of tensors that share their channels."""
    of: dict[ir.Value, _Channels] = {}

    def known(value: ir.Value) -> _Channels:
        return of.setdefault(value, _Channels(values={value}))

    def join(*values: ir.Value) -> _Channels:
        first, *others = (known(value) for value in values)
        for other in others:
            if other is not first:
                first.take(other)
                of.update(dict.fromkeys(other.values, first))
        return first

    for value in (*graph.inputs, *graph.outputs):
        known(value).fixed = True
    for node in graph:
        operands = [value for value in node.inputs if value is not None and not is_constant(value)]
        dims, output = _plain_weight(node), node.outputs[0]
        if dims is not None:
            (x,), group = operands, node.attributes.get_int("group", 1)
            if group == 1:
                known(x).counts.add(dims[1])
                known(x).readers.append(node)
                made = known(output)
            elif group == dims[0] and dims[1] == 1:
                made = join(x, output)
                made.depthwise = True
            else:
                known(x).fixed, made = True, known(output)
                made.fixed = True
            made.counts.add(dims[0])
            made.writers.append(node)
        elif len(operands) == 1 and (
            is_standard(node, *_POOLING)
            or (is_standard(node, *_ELEMENTWISE) and node.inputs[0] is operands[0])
        ):
            join(operands[0], output)
            for extra in node.outputs[1:]:
                known(extra).fixed = True
        elif is_standard(node, *_JOINING) and len(operands) == 2:
            join(*operands, output)
        else:
            for value in (*operands, *node.outputs):
                known(value).fixed = True
    return list({id(channels): channels for channels in of.values()}.values())


def _plain_weight(node: ir.Node) -> tuple[int, ...] | None:
    """Return the weight shape of a convolution of two axes whose constants are all float32, else None."""
    if not is_standard(node, "Conv"):
        return None
    x, *operands = node.inputs
    values = [value.const_value for value in operands if value is not None and is_constant(value)]
    known = [tensor for tensor in values if tensor is not None and tensor.dtype == ir.DataType.FLOAT]
    if x is None or is_constant(x) or len(known) < sum(operand is not None for operand in operands):
        return None
    dims = tuple(known[0].shape.numpy())
    return dims if len(dims) == 4 else None
