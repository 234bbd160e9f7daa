"""Channels filled up with zeros when a file is loaded, to as many as onnxruntime computes fast.

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
import onnx
from onnx import helper, numpy_helper

from rankrl.onnx.export.operators import STANDARD, is_standard

_LEAST_OPSET = 11  # the first in which Pad takes its sizes as an input
_ALIGNMENT = 4  # of channels that are computed in blocks, whatever the block
_PREFIX = "rankrl_pad_"
_ELEMENTWISE = frozenset(
    ("Relu", "LeakyRelu", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Sigmoid", "Softplus", "Tanh")
)
"""What computes every channel by itself and takes nothing else but constants."""
_POOLING = frozenset(("MaxPool", "AveragePool", "GlobalAveragePool"))
_JOINING = frozenset(("Add", "Mul"))


@dataclass
class _Channels:
    """Tensors that have their channels in common: what convolutions make, and all that follows reads alike.

    Attributes:
        counts: How many channels they are, by each convolution that says so.
        writers: Outputs of the convolutions whose output channels they are.
        readers: Outputs of the convolutions that mix them.
        tensors: Names of the tensors.
        depthwise: Whether a depthwise convolution is among the writers.
        fixed: Whether something else makes or takes them, so that they stay as they are.
    """

    counts: set[int] = field(default_factory=set)
    writers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)
    depthwise: bool = False
    fixed: bool = False

    def take(self, other: _Channels) -> None:
        """Take over what another one holds."""
        self.counts |= other.counts
        self.writers += other.writers
        self.readers += other.readers
        self.tensors |= other.tensors
        self.depthwise |= other.depthwise
        self.fixed |= other.fixed

    def missing(self, block: int) -> int:
        """Return how many channels to add; 0 where none are, or where that would take more time."""
        if self.fixed or len(self.counts) != 1:
            return 0
        (count,) = self.counts
        computed = -(-count // block) * block
        pays = 4 * count > block if self.depthwise else 8 * count >= 5 * computed
        return max(block, -(-count // _ALIGNMENT) * _ALIGNMENT) - count if pays else 0


def pad_channels(model: onnx.ModelProto, block: int) -> int:
    """Fill up channels between convolutions of two axes, where that takes less time.

    Fewer than a block become one, more become a multiple of 4. It pays from a quarter of a block on where a
    depthwise convolution is among them; elsewhere where no more than three eighths of what is computed then
    are zeros, as measured (docs/benchmarks.md).

    Args:
        model: Changed in place. Weights that are no float32 constants stay, and with them all channels that
            they make or read.
        block: Channels that the processor computes at a time (`rankrl.device.channel_block`); 1 changes
            nothing.

    Returns:
        How many convolutions make more channels than before.
    """
    graph = model.graph
    opset = next((each.version for each in model.opset_import if each.domain in STANDARD), 0)
    bodies = any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute)
    if block < 2 or opset < _LEAST_OPSET or bodies:
        return 0
    entries = {each.name for each in graph.input}
    constants = {each.name: each for each in graph.initializer if each.name not in entries}
    convs = {node.output[0]: node for node in graph.node if is_standard(node, "Conv")}
    rows, columns, changed = dict[str, int](), dict[str, int](), set[str]()
    for channels in _channels(graph, constants):
        missing = channels.missing(block)
        if missing:
            rows |= dict.fromkeys(channels.writers, missing)
            columns |= dict.fromkeys(channels.readers, missing)
            changed |= channels.tensors
    pads = _Pads()
    for output in [name for name in convs if name in rows or name in columns]:
        conv, added = convs[output], rows.get(output, 0)
        conv.input[1] = pads.padded(conv.input[1], (added, columns.get(output, 0), 0, 0))
        if added and len(conv.input) > 2 and conv.input[2]:
            conv.input[2] = pads.padded(conv.input[2], (added,))
        for attribute in conv.attribute:
            if attribute.name == "group" and attribute.i > 1:
                attribute.i += added
    for position, node in enumerate(pads.nodes.values()):
        graph.node.insert(position, node)
    graph.initializer.extend(pads.sizes.values())
    shapes = [each for each in graph.value_info if each.name not in changed]
    del graph.value_info[:]
    graph.value_info.extend(shapes)
    return len(rows)


def unpad_channels(model: onnx.ModelProto) -> bool:
    """Undo `pad_channels`, for tools that want to find the weights of convolutions as constants.

    Args:
        model: Changed in place.

    Returns:
        Whether there was anything to undo.
    """
    graph = model.graph
    sizes = {
        each.name: numpy_helper.to_array(each) for each in graph.initializer if each.name.startswith(_PREFIX)
    }
    padding = {
        node.output[0]: node
        for node in graph.node
        if is_standard(node, "Pad") and len(node.input) == 2 and node.input[1] in sizes
    }
    for conv in graph.node:
        if not is_standard(conv, "Conv"):
            continue
        added = 0
        for index, name in enumerate(conv.input):
            if index and name in padding:
                source, pads = padding[name].input
                conv.input[index] = source
                added = int(sizes[pads][len(sizes[pads]) // 2])
        for attribute in conv.attribute:
            if attribute.name == "group" and attribute.i > 1:
                attribute.i -= added
    for node in padding.values():
        graph.node.remove(node)
    kept = [each for each in graph.initializer if each.name not in sizes]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return bool(padding)


@dataclass
class _Pads:
    """The nodes that make larger weights, one for each weight and size."""

    nodes: dict[tuple[str, tuple[int, ...]], onnx.NodeProto] = field(default_factory=dict)
    sizes: dict[tuple[int, ...], onnx.TensorProto] = field(default_factory=dict)

    def padded(self, name: str, added: tuple[int, ...]) -> str:
        """Return the name of a constant with so many zeros behind each of its axes."""
        if not any(added):
            return name
        if added not in self.sizes:
            pads = np.array([*[0] * len(added), *added], dtype=np.int64)
            words = "_".join(map(str, added))
            self.sizes[added] = numpy_helper.from_array(pads, f"{_PREFIX}by_{words}")
        if (name, added) not in self.nodes:
            output = f"{_PREFIX}{len(self.nodes)}"  # short: there are three in every layer
            node = helper.make_node("Pad", [name, self.sizes[added].name], [output], output)
            self.nodes[name, added] = node
        return self.nodes[name, added].output[0]


def _channels(graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto]) -> Iterable[_Channels]:
    """Return which tensors have their channels in common."""
    of: dict[str, _Channels] = {}

    def known(name: str) -> _Channels:
        return of.setdefault(name, _Channels(tensors={name}))

    def join(*names: str) -> _Channels:
        first, *others = (known(name) for name in names)
        for other in others:
            if other is not first:
                first.take(other)
                of.update(dict.fromkeys(other.tensors, first))
        return first

    for value in (*graph.input, *graph.output):
        known(value.name).fixed = True
    for node in graph.node:
        operands = [name for name in node.input if name and name not in constants]
        dims = _plain_weight(node, constants)
        if dims is not None:
            output, group = node.output[0], next((a.i for a in node.attribute if a.name == "group"), 1)
            if group == 1:
                known(node.input[0]).counts.add(dims[1])
                known(node.input[0]).readers.append(output)
                made = known(output)
            elif group == dims[0] and dims[1] == 1:
                made = join(node.input[0], output)
                made.depthwise = True
            else:
                known(node.input[0]).fixed, made = True, known(output)
                made.fixed = True
            made.counts.add(dims[0])
            made.writers.append(output)
        elif len(operands) == 1 and (
            is_standard(node, *_POOLING)
            or (is_standard(node, *_ELEMENTWISE) and node.input[0] == operands[0])
        ):
            join(operands[0], node.output[0])
            for extra in node.output[1:]:
                known(extra).fixed = True
        elif is_standard(node, *_JOINING) and len(operands) == 2:
            join(*operands, node.output[0])
        else:
            for name in (*operands, *node.output):
                known(name).fixed = True
    return list({id(each): each for each in of.values()}.values())


def _plain_weight(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> tuple[int, ...] | None:
    """Return the sizes of a convolution's weight, if it has two axes, and float32 constants alone."""
    if not is_standard(node, "Conv") or any(name and name not in constants for name in node.input[1:]):
        return None
    operands = [constants[name] for name in node.input[1:] if name]
    if any(each.data_type != onnx.TensorProto.FLOAT for each in operands):
        return None
    dims = tuple(operands[0].dims)
    return dims if len(dims) == 4 else None
