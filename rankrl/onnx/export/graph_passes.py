"""Rewrite exported graphs: fold constants and batch norms, name axes, normalise bytes, replace slices.

Shortcuts that only subsample and add channels of zeros become 1x1 convolutions (`convolve_subsampling`).

`pad_channels` pads the channels of convolutions with zeros to numbers that onnxruntime computes fast.
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

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from rankrl.data import Preprocessing
from rankrl.onnx.graph_edits import (
    Array,
    add_constant,
    is_constant,
    is_standard,
    names_in,
    new_name,
    node_of,
    opset_of,
    put_first,
    put_in_place,
    stored,
    values_in,
    without_unused,
)

_SMALL = 256
"""Elements that a folded vector may always have, such as a shape or axes."""


def simplify(model: ir.Model, *, fold_batchnorm: bool, keep: Collection[str] = ()) -> None:
    """Fold constants and batch normalisations, and remove unused nodes and the exporter's metadata."""
    from onnxscript import optimizer  # takes a while to import

    def should_fold(node: ir.Node) -> bool | None:
        kept = any(value is not None and value.name in keep for value in node.inputs)
        return False if kept else _should_fold(node)

    turned = {
        str(node.outputs[0].name): str(node.inputs[0].name)
        for node in model.graph
        if is_standard(node, "Transpose") and node.inputs[0] is not None and node.inputs[0].is_initializer()
    }
    if fold_batchnorm:
        optimizer.optimize_ir(model, should_fold=should_fold)
        fold_batchnorm_into_computed_weights(model)
    else:  # the optimizer's rewrite rules would fold them
        optimizer.inline(model)
        optimizer.fold_constants_ir(model, should_fold=should_fold)
        optimizer.remove_unused_nodes(model)
    _name_turned_weights(model.graph, turned)
    _remove_notes(model)


def _name_turned_weights(graph: ir.Graph, turned: Mapping[str, str]) -> None:
    """Give weights that the exporter transposed their parameter names back."""
    constants = graph.initializers
    named = {new: old for new, old in turned.items() if new in constants and old not in constants}
    if len(set(named.values())) == len(named):
        for new, old in named.items():
            constants[new].name = old


def fold_batchnorm_into_computed_weights(model: ir.Model) -> None:
    """Fold batch normalisation into convolutions whose weight is itself computed in the graph (from cores).

    With s = γ / √(σ² + ε), BN(W ∗ x + b) = (s W) ∗ x + s (b − μ) + β (Ioffe and Szegedy 2015, algorithm 2).
    The product s W is a `Mul` of the computed weight: constant too, hence evaluated once, on loading.
    """
    graph = model.graph
    taken = names_in(graph)
    for batchnorm in [node for node in graph if is_standard(node, "BatchNormalization")]:
        x, *constants = batchnorm.inputs
        conv = None if x is None else x.producer()
        if x is None or conv is None or not is_standard(conv, "Conv"):
            continue
        kernel, bias = conv.attributes.get_ints("kernel_shape"), (*conv.inputs, None)[2]
        statistics = [stored(value) for value in constants]
        old_bias = np.zeros(1) if bias is None else stored(bias)
        alone = len(x.uses()) == 1 and not x.is_graph_output()
        if not alone or kernel is None or old_bias is None or any(array is None for array in statistics):
            continue
        gamma, beta, mean, variance = (array.astype(np.float64) for array in statistics if array is not None)
        scale = gamma / np.sqrt(variance + batchnorm.attributes.get_float("epsilon", 1e-5))
        folded = {
            "scale": scale.reshape(-1, *[1] * (len(kernel) + 1)),
            "bias": (old_bias.astype(np.float64) - mean) * scale + beta,
        }
        name = batchnorm.outputs[0].name
        factor, shift = (
            add_constant(graph, new_name(f"{name}_{kind}", taken), values.astype(np.float32))
            for kind, values in folded.items()
        )
        scaled = node_of("Mul", [conv.inputs[1], factor], new_name(f"{name}_weight", taken))
        scaled.name = new_name(f"{name}_scaled_weight", taken)
        operands = [conv.inputs[0], scaled.outputs[0], shift]
        merged = ir.node("Conv", operands, conv.attributes, name=conv.name)
        put_in_place(graph, [conv, batchnorm], [scaled, merged])
    without_unused(model)


def name_axes(graph: ir.Graph, axes: Sequence[Mapping[int, str]]) -> None:
    """Name free axes of the inputs, and sizes that follow from them, after these (`2*batch`, not `2*s77`)."""
    names: dict[str, str] = {}
    for value, named in zip(graph.inputs, axes, strict=True):
        sizes = () if value.shape is None else value.shape
        for index, size in enumerate(sizes):
            if index in named and isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, named[index])
    if not names:
        return
    occurrence = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")

    def renamed(axis: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(axis, int) or axis.value is None:
            return axis if isinstance(axis, int) else None
        return occurrence.sub(lambda match: names[match[0]], axis.value)

    for value in (value for part in (graph, *graph.subgraphs()) for value in values_in(part)):
        if value.shape is not None:
            value.shape = ir.Shape(map(renamed, value.shape))


def name_values(graph: ir.Graph, values: Sequence[ir.Value], names: Sequence[str]) -> bool:
    """Rename values, and inner values that have these names; False if constants or other ends have them."""
    ends = {*graph.inputs, *graph.outputs, *graph.initializers.values()} - set(values)
    if {value.name for value in ends} & set(names):
        return False
    taken = names_in(graph) | set(names)
    for value in (value for part in (graph, *graph.subgraphs()) for value in values_in(part)):
        if value.name in names and value not in values:
            value.name = new_name(str(value.name), taken)
    for value, name in zip(values, names, strict=True):
        value.name = name
    return True


def take_bytes(graph: ir.Graph, preprocessing: Preprocessing) -> None:
    """Replace the float input (N, channels, H, W) by uint8 images (N, H, W, channels), normalised inside."""
    # Not folded into the first convolution: that pads with zeros, so that a mean in its bias would be wrong
    # along the border.
    entry, taken = graph.inputs[0], names_in(graph)
    uses = list(entry.uses())
    factors = [
        add_constant(graph, new_name(f"{entry.name}_{kind}", taken), values.view(-1, 1, 1).numpy())
        for kind, values in zip(("scale", "offset"), preprocessing.scale_and_offset(), strict=True)
    ]
    steps: list[tuple[str, str, list[ir.Value], dict[str, Any]]] = [
        ("Transpose", "planes", [], {"perm": (0, 3, 1, 2)}),
        ("Cast", "float", [], {"to": int(ir.DataType.FLOAT)}),
        ("Mul", "scaled", factors[:1], {}),
        ("Add", "normalised", factors[1:], {}),
    ]
    nodes: list[ir.Node] = []
    x = entry
    for op_type, stage, operands, attributes in steps:
        nodes.append(node_of(op_type, [x, *operands], new_name(f"{entry.name}_{stage}", taken), attributes))
        x = nodes[-1].outputs[0]
    put_first(graph, nodes)
    for reader, index in uses:
        reader.replace_input_with(index, x)
    batch = 1 if entry.shape is None else entry.shape[0]
    entry.type = ir.TensorType(ir.DataType.UINT8)
    entry.shape = ir.Shape((batch, preprocessing.height, preprocessing.width, preprocessing.channels))


def _should_fold(node: ir.Node) -> bool | None:
    """Refuse to fold a node whose result is larger than its operands: cores stay cores in the file."""
    if is_standard(node, "Expand"):  # a bias of zeros: computed, it would keep batch norms from folding
        return None
    operands = sum(value.const_value.size for value in node.inputs if value and value.const_value is not None)
    for output in node.outputs:
        shape = output.shape
        if shape is None or not shape.is_static():
            continue
        if math.prod(shape.numpy()) > (operands if len(shape) > 1 else max(operands, _SMALL)):
            return False
    return None


def _remove_notes(model: ir.Model) -> None:
    """Remove stack traces and tracing notes: they hold source paths and can outweigh a small model."""
    passes.ClearMetadataAndDocStringPass()(model)
    noted: list[ir.Model | ir.Value] = [model, *values_in(model.graph)]
    for holder in noted:
        holder.metadata_props.clear()
        holder.doc_string = None


_SELECTION = "rankrl_select_"
_MOST_CHANNELS = 64
"""Channels that are read at most: a convolution mixes all of them, and more are copied faster (as timed)."""
_FIRST_SPATIAL = 2
_RANK = 4  # of a batch of images (N, C, H, W)


@dataclass
class _Chain:
    """Slices, and the channel padding behind them, that one convolution may replace."""

    nodes: list[ir.Node]
    strides: dict[int, int]
    before: int = 0
    after: int = 0


def convolve_subsampling(model: ir.Model) -> int:
    """Replace slices that subsample, and channel padding behind them, by convolutions; count these."""
    graph = model.graph
    made = 0
    for node in list(graph):
        if not is_standard(node, "Slice") or node.graph is not graph:  # taken out with one before
            continue
        chain, source = _chain(node), node.inputs[0]
        count = None if source is None else _static_channels(source)
        if chain is None or count is None or count > _MOST_CHANNELS:
            continue
        _replace(graph, chain, count)
        made += 1
    if made:
        without_unused(model)
    return made


def store_selections(model: ir.Model) -> bool:
    """Store the weights that `convolve_subsampling` builds from nodes, for tools that want constants."""
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
    """Tell whether a node is a convolution that `convolve_subsampling` wrote."""
    return is_standard(node, "Conv") and _selects(node.inputs[1])


def _selects(value: ir.Value | None) -> bool:
    return value is not None and str(value.name).startswith(_SELECTION)


def _static_channels(value: ir.Value) -> int | None:
    """Return the static number of channels of a float32 tensor (N, C, H, W), else None."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != _RANK:
        return None
    count = value.shape[1]
    return count if isinstance(count, int) and count else None


def _chain(first: ir.Node) -> _Chain | None:
    """Return the chain that begins with a slice, or None if it does more than subsample."""
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
    """Return a node's only reader; None where bodies or the graph's outputs read it, too."""
    value = node.outputs[0]
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not node.graph:
        return None
    return uses[0].node


def _strides(node: ir.Node) -> dict[int, int] | None:
    """Return the step of a slice along each spatial axis; None unless it covers these axes whole."""
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
    """Return the numbers of zero channels that a `Pad` adds before and after, None if it does more."""
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
    """Replace a chain that reads `channels` channels by a 1x1 convolution with strides."""
    rows = chain.before + channels + chain.after
    weight = _weight(graph, rows, channels, -chain.before)
    strides = [chain.strides.get(axis, 1) for axis in range(_FIRST_SPATIAL, _RANK)]
    conv = node_of(
        "Conv",
        [chain.nodes[0].inputs[0], weight],
        f"{_SELECTION}{chain.nodes[-1].outputs[0].name}",
        {"kernel_shape": [1, 1], "strides": strides},
    )
    put_in_place(graph, chain.nodes, [conv])


def _weight(graph: ir.Graph, rows: int, columns: int, offset: int) -> ir.Value:
    """Return a weight (rows, columns, 1, 1) with ones on one diagonal, computed by nodes of the graph."""
    base = f"{_SELECTION}{rows}_{columns}_{-offset}"
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


_LEAST_OPSET = 11  # the first in which Pad takes its sizes as an input
_ALIGNMENT = 4  # of channels that are computed in blocks, whatever the block
_PADDING = "rankrl_pad_"
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
    for channels in _coupled_channels(graph):
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
    sizes = {name: value for name, value in graph.initializers.items() if name.startswith(_PADDING)}
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
            self.sizes[added] = add_constant(self.graph, f"{_PADDING}by_{words}", pads)
        if (value, added) not in self.nodes:
            name = f"{_PADDING}{len(self.nodes)}"  # short: there are three in every layer
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


def _coupled_channels(graph: ir.Graph) -> Iterable[_Channels]:
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
