"""Find the nodes with weights in a graph, join those that share one, and say why some stay dense."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from decomposition.network.layers import FLOAT_BYTES, OPAQUE_KINDS, LayerSpec, Storage
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.node_layers import (
    PRODUCTS,
    Absorber,
    Site,
    absorber_of,
    absorbing,
    counted_recurrent,
    foreign_reason,
    foreign_weight,
    is_recurrent,
    layer_spec,
    lstm_site,
    padding_of,
    recurrent_reason,
    recurrent_weight,
    refusal_of,
    sizes_for_one,
    weight_matrix,
)
from rankrl.onnx.graph.precisions import (
    HALF,
    HALF_BYTES,
    MOVING,
    computes_integers,
    constant,
    integer_weight,
    is_rounded,
    rounded_constant,
)
from rankrl.onnx.graph_edits import Array, depending, is_standard, until


def with_twins(sites: Sequence[Site], uses: Mapping[str, int]) -> list[Site]:
    """Join nodes that share a weight into one site, the first of them, which holds the others."""
    joined = list(sites)
    names = dict.fromkeys(site.weight_name for site in sites if site.weight_name)
    for name in [name for name in names if uses[name] > 1]:
        places = [place for place, site in enumerate(sites) if site.weight_name == name]
        first, *others = (sites[place] for place in places)
        if _are_alike([first, *others], uses[name]):
            joined[places[0]] = _joined(first, others)
            reason = f"it shares its weight with {first.name!r} and becomes what that does"
            for place in places[1:]:
                spec = replace(sites[place].spec, params=0, macs=0, refusal=reason)
                joined[place] = replace(sites[place], spec=spec)
        else:
            reason = "its weight is used in another way too, by another node or as an output"
            for place in places:
                joined[place] = replace(sites[place], spec=replace(sites[place].spec, refusal=reason))
    return joined


def _are_alike(sites: Sequence[Site], uses: int) -> bool:
    """Tell whether the nodes with one weight, which is used so often, can be one site."""
    first = sites[0].weight  # as the node multiplies with it: one of them may turn it
    equal = all(torch.equal(first, site.weight) for site in sites[1:])
    return equal and len(sites) >= uses and len({_role(site) for site in sites}) == 1


def _joined(first: Site, others: Sequence[Site]) -> Site:
    """Return the first of several nodes with one weight as the site that stands for all."""
    specs = [site.spec for site in (first, *others)]
    spec = replace(
        first.spec,
        input_sizes=tuple(size for spec in specs for size in spec.input_sizes),
        output_sizes=tuple(size for spec in specs for size in spec.output_sizes),
        macs=sum(spec.macs for spec in specs),
    )
    # Nothing but their own bias takes up a change behind all of them.
    absorber: Absorber | None = "bias" if first.absorber == "bias" else None
    return replace(first, spec=spec, absorber=absorber, twins=tuple(others))


def use_counts(graph: ir.Graph) -> Counter[str]:
    """Count the uses of every value; a constant that is transposed on its way counts by its own name."""
    counts: Counter[str] = Counter()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if is_standard(node, *MOVING) and constant_root(node.inputs[0]) is not None:
            continue
        counts.update(constant_name(value) for value in node.inputs if value is not None)
    counts.update(constant_name(value) for value in graph.outputs)
    return counts


def constant_name(value: ir.Value) -> str:
    return str((constant_root(value) or value).name)


def constant_root(value: ir.Value | None) -> ir.Value | None:
    """Return the constant of which a value is a copy, perhaps transposed or reshaped; None without one."""
    while value is not None and ir.convenience.get_const_tensor(value) is None:
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and is_standard(producer, *MOVING) else None
    return value


def _role(site: Site) -> tuple[object, ...]:
    """Return the key that nodes with one weight must share to be one site; strides and pads may differ."""
    return (site.op_type, site.bias_name, site.spec.refusal, *site.weight.shape)


_QUANTISED = "it computes in integers already"
_STORED = "its weight is in integers already; compress the file in floating point that it was made from"
_CONTRACTED = "its weight is contracted from constants while the file runs; compress the network it came from"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Seen:
    """Shapes, weights and uses in a graph, recorded on one batch."""

    graph: ir.Graph
    shapes: Shapes
    batch: int
    variable: Collection[ir.Value]


def find_sites(network: OnnxNetwork, feed: Feed) -> list[Site]:
    """Return the nodes that are convolutions or matrix products with a weight, in the order of the graph."""
    model = network.graph_model()
    variable = depending(model.graph, model.graph.inputs)
    seen = _Seen(model.graph, _shapes(model, network, feed), network.axes.fixed or 1, variable)
    sites: list[Site] = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        computes_weight = node.graph is model.graph and node.outputs[0] not in variable
        if _multiplies(node) and not computes_weight:
            site = _site(node, len(sites), seen)
            if site is not None:
                sites.append(_counted(site, seen))
    nodes = {node.name: node for node in model.graph}
    return [
        site if site.spec.refusal is not None else _as_stored(site, nodes[site.name], network)
        for site in with_twins(sites, use_counts(model.graph))
    ]


def _as_stored(site: Site, node: ir.Node, network: OnnxNetwork) -> Site:
    """Add the stored form of a node's constants (precision, bytes) to its site."""
    places = {"weight": (1, 2) if site.hidden else (1,), "bias": (2,) if site.bias is not None else ()}
    stored: dict[str, list[ir.Value]] = {
        kind: [root for index in indices if (root := constant_root(node.inputs[index])) is not None]
        for kind, indices in places.items()
    }
    if site.absorber in ("add", "batch_norm"):
        behind, index, _ = absorbing(node.outputs[0], site)
        stored["shifted"] = [root for root in [constant_root(behind.inputs[index])] if root is not None]
    narrow, sizes, whole = dict[str, ir.DataType](), dict[str, int](), 0
    for kind, roots in stored.items():
        for root in roots:
            tensor = ir.convenience.get_const_tensor(root)
            assert tensor is not None
            if tensor.dtype in HALF:
                narrow[kind] = tensor.dtype
            if tensor.dtype in HALF or root.name in network.half.types:
                sizes[kind] = HALF_BYTES
            if kind == "weight":
                whole += network.stored_bytes(str(root.name), tensor)
    storage = Storage(sizes.get("weight", FLOAT_BYTES), sizes.get("bias", FLOAT_BYTES))
    spec = replace(site.spec, storage=storage)
    biases = storage.bias * (site.spec.out_channels if site.spec.bias else 0)
    if whole + biases != spec.bytes_of(spec.params):
        spec = replace(spec, storage=replace(storage, whole=whole + biases))
    return replace(site, spec=spec, narrow=narrow)


def _shapes(model: ir.Model, network: OnnxNetwork, feed: Feed) -> Shapes:
    """Return the shapes of the operands and outputs of nodes with weights, for one input of the network."""
    nodes = [node for node in model.graph if _multiplies(node)]
    ends = [value for node in nodes for value in (*node.inputs[:2], node.outputs[0]) if value is not None]
    computed = list(dict.fromkeys(str(value.name) for value in ends if value.name and value.producer()))
    one = network.axes.one(feed)
    values = dict(one)
    if computed:
        session = GraphSession(until(model, computed), network.source)
        values |= zip(session.output_names, session.run(one), strict=True)
    return {name: value.shape for name, value in values.items()}


def _multiplies(node: ir.Node) -> bool:
    """Tell whether a node is a convolution, product or recurrent layer, or a foreign node with a weight."""
    products = is_standard(node, *PRODUCTS) or is_recurrent(node) or computes_integers(node)
    return products or foreign_weight(node) is not None


def _counted(site: Site, seen: _Seen) -> Site:
    """Add a node's multiply-accumulates, which count towards the network's even if it stays, to its site."""
    spec = site.spec
    if spec.kind in OPAQUE_KINDS and site.input_name in seen.shapes:
        return replace(site, spec=counted_recurrent(spec, seen.shapes[site.input_name], seen.batch))
    if spec.refusal is None or site.output_name not in seen.shapes or spec.params == 0:
        return site
    shape = seen.shapes[site.input_name if spec.kind.startswith("conv_transpose") else site.output_name]
    spatial = slice(1, -1) if spec.kind == "linear" else slice(2, None)
    macs = math.prod(sizes_for_one(shape, spatial, seen.batch)) * spec.params
    params = 0 if spec.refusal == _CONTRACTED else spec.params
    return replace(site, spec=replace(spec, macs=macs, params=params))


def _site(node: ir.Node, index: int, seen: _Seen) -> Site | None:
    """Return the site of a node; None for a product of two values that both depend on the inputs."""
    weight_and_refusal = _weight(node, seen)
    if weight_and_refusal is None:
        return None
    weight, refusal = weight_and_refusal
    spec = layer_spec(node, node.name or f"{node.op_type}_{index}", index, weight)
    if refusal is not None or weight is None:
        x, y = node.inputs[0], node.outputs[0]
        refused = replace(spec, refusal=refusal)
        return Site(refused, node.op_type, (x.name if x else "") or "", y.name or "", torch.empty(0))
    if is_recurrent(node):
        return lstm_site(node, spec, weight)
    return (_transposed if node.op_type == "ConvTranspose" else _dense)(node, spec, weight, seen)


def _weight(node: ir.Node, seen: _Seen) -> tuple[Array | None, str | None] | None:
    """Return the weight of a node and why it has to stay as it is; None for a node without a weight."""
    if is_recurrent(node):
        held = recurrent_weight(node)
        return held, recurrent_reason(node, held, inside=node.graph is not seen.graph)
    if computes_integers(node):
        integers = integer_weight(node)
        return None if integers is None else (integers, _QUANTISED)
    foreign = foreign_weight(node)
    if foreign is not None:
        return foreign, foreign_reason(node)
    x, value = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    weight = constant(value)
    if weight is not None:
        return weight, _refusal(node, weight, seen)
    rounded = rounded_constant(value)
    if rounded is not None:
        return rounded, _QUANTISED if is_rounded(x) else _STORED
    if node.op_type in ("MatMul", "Gemm") and (left := constant(x)) is not None:
        return left, "its weight is the left factor; only a right one is taken"
    if node.graph is seen.graph and value is not None and value not in seen.variable:
        # Only its shape is known here; the file holds the cores that it is contracted from.
        return np.broadcast_to(np.float32(0), seen.shapes.get(str(value.name), ())), _CONTRACTED
    if node.op_type in ("Conv", "ConvTranspose"):
        return None, "its weight is computed from the inputs"
    return None


def _refusal(node: ir.Node, weight: Array, seen: _Seen) -> str | None:
    """Return why a node with a constant weight has to stay as it is, None where it can be compressed."""
    if node.graph is not seen.graph:
        return "it lies in the body of an If, Loop or Scan, or in a function"
    reason = refusal_of(node, weight)
    if reason is not None:
        return reason
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.name not in seen.shapes or y.name not in seen.shapes:
        return "its input is not known"
    return None if all(value.dtype in (None, ir.DataType.FLOAT) for value in (x, y)) else _QUANTISED


def _dense(node: ir.Node, spec: LayerSpec, weight: Array, seen: _Seen) -> Site:
    x, value, bias_value = (*node.inputs, None)[:3]
    assert x is not None
    assert value is not None
    input_name, output_name = str(x.name), str(node.outputs[0].name)
    array = rounded_constant(bias_value)
    bias = None
    if array is not None:
        bias = torch.from_numpy(np.array(array, dtype=np.float32).reshape(-1))
        bias = bias.expand(spec.out_channels).clone()
    matrix = weight_matrix(node, weight)
    spatial = slice(1, -1) if spec.kind == "linear" else slice(2, None)
    input_size, output_size = (
        sizes_for_one(seen.shapes[name], spatial, seen.batch) for name in (input_name, output_name)
    )
    pads, auto_pad = padding_of(node, len(spec.kernel_size))
    spec = replace(
        spec,
        input_sizes=(input_size,),
        output_sizes=(output_size,),
        params=matrix.size + (0 if bias is None else bias.numel()),
        bias=bias is not None,
        macs=math.prod(output_size) * matrix.size,
    )
    return Site(
        spec,
        node.op_type,
        input_name,
        output_name,
        torch.from_numpy(np.array(matrix, dtype=np.float32)),
        bias,
        pads,
        auto_pad,
        tuple(node.attributes.get_ints("dilations", (1,) * len(spec.kernel_size))),
        absorber_of(node, spec),
        constant_name(value),
        str(bias_value.name) if bias is not None and bias_value is not None else "",
    )


def _transposed(node: ir.Node, spec: LayerSpec, weight: Array, seen: _Seen) -> Site:
    """Return a transposed convolution as the 1x1 convolution that it multiplies by (`Site.spread`)."""
    x, value, bias = (*node.inputs, None)[:3]
    assert x is not None
    assert value is not None
    sizes = sizes_for_one(seen.shapes[str(x.name)], slice(2, None), seen.batch)
    ones = (1,) * len(spec.kernel_size)
    rows = torch.from_numpy(np.array(weight, dtype=np.float32)).flatten(1).T.contiguous()
    convolution = replace(
        spec,
        out_channels=len(rows),
        kernel_size=ones,
        stride=ones,
        bias=False,
        input_sizes=(sizes,),
        output_sizes=(sizes,),
        params=weight.size,
        macs=math.prod(sizes) * weight.size,
    )
    return Site(
        convolution,
        node.op_type,
        str(x.name),
        str(node.outputs[0].name),
        rows.reshape(*rows.shape, *ones),
        pads=tuple((0, 0) for _ in ones),
        dilation=ones,
        weight_name=constant_name(value),
        bias_name="" if bias is None else str(bias.name),
        spread=spec.kernel_size,
    )
