"""Which nodes of a graph multiply with a constant weight, and what keeps others as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from decomposition.network.kinds import Kind
from decomposition.network.layers import LayerSpec
from rankrl.onnx.graph.foreign import foreign_reason, foreign_weight
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.quantised import (
    MOVING,
    computes_integers,
    constant,
    integer_weight,
    is_rounded,
    rounded_constant,
)
from rankrl.onnx.graph.site import Absorber, Site
from rankrl.onnx.graph_edits import Array, depending, until
from rankrl.onnx.operators import is_standard

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_QUANTISED = "it computes in integers already"
_STORED = "its weight is in integers already; compress the file in floating point that it was made from"
_CONTRACTED = "its weight is contracted from constants while the file runs; compress the network it came from"
_CONVOLUTIONS: dict[int, Kind] = {1: "conv1d", 2: "conv2d", 3: "conv3d"}
_TRANSPOSED: dict[int, Kind] = {1: "conv_transpose1d", 2: "conv_transpose2d", 3: "conv_transpose3d"}


def find_sites(network: OnnxNetwork, feed: Feed) -> list[Site]:
    """Return the nodes that are convolutions or matrix products with a weight, in the order of the graph.

    Args:
        network: The network.
        feed: Inputs to see shapes on; the first one is run (a whole batch where its size is fixed).

    Raises:
        OnnxGraphError: onnxruntime cannot run the network.
    """
    model = network.graph_model()
    variable = depending(model.graph, model.graph.inputs)
    main = [node for node in model.graph if _multiplies(node)]
    ends = [each for node in main for each in (*node.inputs[:2], node.outputs[0]) if each is not None]
    computed = list(dict.fromkeys(str(each.name) for each in ends if each.producer() is not None))
    shapes: dict[str, tuple[int, ...]] = {}
    if computed:
        one = network.axes.one(feed)
        seen = until(model, computed)
        session = GraphSession(seen, network.source)
        shapes = {
            name: value.shape for name, value in zip(session.output_names, session.run(one), strict=True)
        }
        shapes |= {name: value.shape for name, value in one.items()}
    owners = _owners(model.graph)
    found: list[Site] = []
    shared: dict[str, int] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if _multiplies(node):
            if node.graph is model.graph and node.outputs[0] not in variable:
                continue  # it is how a weight is computed
            site = _site(node, model, shapes, len(found), network.fixed_batch or 1, variable)
            if site is not None:
                found.append(_counted(site, shapes, network.fixed_batch or 1))
                if site.weight_name and owners[site.weight_name] > 1:
                    shared[site.weight_name] = owners[site.weight_name]
    return _with_twins(found, shared)


def _multiplies(node: ir.Node) -> bool:
    """Tell whether a node is a convolution or product, or holds a weight without saying what it does."""
    return is_standard(node, *_PRODUCTS) or computes_integers(node) or foreign_weight(node) is not None


def _owners(graph: ir.Graph) -> dict[str, int]:
    """Count how often every value is used, a constant that is only turned on its way in its own name."""
    owners: Counter[str] = Counter()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if is_standard(node, *MOVING) and _constant_root(node.inputs[0]) is not None:
            continue
        owners.update(_origin(value) for value in node.inputs if value is not None)
    owners.update(_origin(value) for value in graph.outputs)
    return owners


def _constant_root(value: ir.Value | None) -> ir.Value | None:
    """Return the constant that a value is, turned or reshaped perhaps; None where it is none."""
    while value is not None and ir.convenience.get_const_tensor(value) is None:
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and is_standard(producer, *MOVING) else None
    return value


def _origin(value: ir.Value) -> str:
    """Return the name of the constant behind a value, or of the value itself."""
    return str((_constant_root(value) or value).name)


def _with_twins(sites: Sequence[Site], shared: Mapping[str, int]) -> list[Site]:
    """Return the nodes of which those that share a weight are one, the first; the others stay with it.

    Args:
        sites: All nodes, each for itself.
        shared: How often a weight that several nodes share is used in the whole graph, by its name.
    """
    found = list(sites)
    for name, uses in shared.items():
        places = [place for place, site in enumerate(sites) if site.weight_name == name]
        alike = {_role(sites[place]) for place in places}
        first, *others = (sites[place] for place in places)
        equal = all(torch.equal(first.weight, each.weight) for each in others)  # as used: one may be turned
        if len(places) < uses or len(alike) > 1 or not equal:
            reason = "its weight is used in another way too, by another node or as an output"
            for place in places:
                found[place] = replace(sites[place], spec=replace(sites[place].spec, refusal=reason))
            continue
        specs = [site.spec for site in (first, *others)]
        spec = replace(
            first.spec,
            input_sizes=tuple(size for each in specs for size in each.input_sizes),
            output_sizes=tuple(size for each in specs for size in each.output_sizes),
            macs=sum(each.macs for each in specs),
        )
        # Nothing but their own bias takes up a change behind all of them.
        absorber: Absorber | None = "bias" if first.absorber == "bias" else None
        found[places[0]] = replace(first, spec=spec, absorber=absorber, twins=tuple(others))
        for place in places[1:]:
            told = f"it shares its weight with {first.name!r} and becomes what that does"
            none = replace(sites[place].spec, params=0, macs=0, refusal=told)
            found[place] = replace(sites[place], spec=none)
    return found


def _role(site: Site) -> tuple[object, ...]:
    """Return what nodes with one weight must have in common to be one site; strides and pads may differ."""
    return (site.op_type, site.bias_name, site.spec.refusal, *site.weight.shape)


def _counted(site: Site, shapes: Mapping[str, tuple[int, ...]], batch: int) -> Site:
    """Return a node that stays as it is with its multiply-accumulates, which count towards the whole."""
    spec = site.spec
    if spec.refusal is None or site.output_name not in shapes or spec.params == 0:
        return site
    shape = shapes[site.input_name if spec.kind.startswith("conv_transpose") else site.output_name]
    spatial = slice(1, -1) if spec.kind == "linear" else slice(2, None)
    macs = math.prod(_for_one(shape, spatial, batch)) * spec.params
    return replace(
        site, spec=replace(spec, macs=macs, params=0 if spec.refusal == _CONTRACTED else spec.params)
    )


def _site(
    node: ir.Node,
    model: ir.Model,
    shapes: Mapping[str, tuple[int, ...]],
    index: int,
    batch: int,
    variable: Collection[ir.Value],
) -> Site | None:
    """Return what a node is; None for a product of two values that both depend on the inputs.

    `variable` are the values of the main graph that depend on the inputs.
    """
    name = node.name or f"{node.op_type}_{index}"
    if computes_integers(node):
        held = integer_weight(node)
        return None if held is None else _refused(node, name, index, held, _QUANTISED)
    held = foreign_weight(node)
    if held is not None:
        return _refused(node, name, index, held, foreign_reason(node))
    x, y = node.inputs[0], node.outputs[0]
    given = node.inputs[1] if len(node.inputs) > 1 else None
    weight = constant(given)
    if weight is None:
        rounded = rounded_constant(given)
        if rounded is not None:
            return _refused(node, name, index, rounded, _QUANTISED if is_rounded(x) else _STORED)
        if node.op_type in ("MatMul", "Gemm") and (left := constant(x)) is not None:
            return _refused(
                node, name, index, left, "its weight is the left factor; only a right one is taken"
            )
        if node.graph is model.graph and given is not None and given not in variable:
            # Only its shape is known here; the file holds what it is contracted from.
            shape = shapes.get(str(given.name), ())
            return _refused(node, name, index, np.broadcast_to(np.float32(0), shape), _CONTRACTED)
        if node.op_type in ("Conv", "ConvTranspose"):
            return _refused(node, name, index, None, "its weight is computed from the inputs")
        return None
    if node.graph is not model.graph:
        return _refused(
            node, name, index, weight, "it lies in the body of an If, Loop or Scan, or in a function"
        )
    reason = _refusal(node, weight)
    if reason is not None:
        return _refused(node, name, index, weight, reason)
    assert x is not None
    assert x.name is not None
    assert y.name is not None
    if x.name not in shapes or y.name not in shapes:
        return _refused(node, name, index, weight, "its input is not known")
    spec = _spec(node, name, index, weight)
    bias = rounded_constant(node.inputs[2]) if len(node.inputs) > 2 else None
    own = None if bias is None else torch.from_numpy(np.array(bias, dtype=np.float32).reshape(-1))
    if own is not None:
        own = own.expand(spec.out_channels).clone()
    if not _is_float(x, y):
        return _refused(node, name, index, weight, _QUANTISED)
    if node.op_type == "ConvTranspose":
        return _transposed(node, spec, weight, _for_one(shapes[x.name], slice(2, None), batch))
    matrix = _plain(node, weight)
    spatial = slice(1, -1) if spec.kind == "linear" else slice(2, None)
    sizes = tuple(_for_one(shapes[name], spatial, batch) for name in (x.name, y.name))
    pads, auto_pad = _padding(node, len(spec.kernel_size))
    positions = math.prod(sizes[1])
    spec = replace(
        spec,
        input_sizes=(sizes[0],),
        output_sizes=(sizes[1],),
        params=matrix.size + (0 if own is None else own.numel()),
        bias=own is not None,
        macs=positions * matrix.size,
    )
    return Site(
        spec,
        node.op_type,
        x.name,
        y.name,
        torch.from_numpy(np.array(matrix, dtype=np.float32)),
        own,
        pads,
        auto_pad,
        tuple(node.attributes.get_ints("dilations", (1,) * len(spec.kernel_size))),
        _absorber(node, own is not None, spec),
        _origin(given) if given is not None else "",
        str(node.inputs[2].name) if own is not None and node.inputs[2] is not None else "",
    )


def _transposed(node: ir.Node, spec: LayerSpec, weight: Array, sizes: tuple[int, ...]) -> Site:
    """Return a transposed convolution, seen as what it multiplies (`Site.spread`)."""
    x, given, bias = (*node.inputs, None)[:3]
    assert x is not None
    assert given is not None
    ones = (1,) * len(spec.kernel_size)
    rows = torch.from_numpy(np.array(weight, dtype=np.float32)).flatten(1).T.contiguous()
    seen = replace(
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
        seen,
        node.op_type,
        str(x.name),
        str(node.outputs[0].name),
        rows.reshape(*rows.shape, *ones),
        pads=tuple((0, 0) for _ in ones),
        dilation=ones,
        weight_name=_origin(given),
        bias_name="" if bias is None else str(bias.name),
        spread=spec.kernel_size,
    )


def _refusal(node: ir.Node, weight: Array) -> str | None:
    """Return why a node with a constant weight has to stay as it is."""
    if weight.dtype != np.float32:
        return f"its weight is {weight.dtype}; only float32 is taken"
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = node.attributes.get_int("group", 1)
        if groups > 1:
            return f"grouped convolution (group={groups}); only group=1 can be decomposed"
        if weight.ndim not in (3, 4):
            return f"a convolution along {weight.ndim - 2} axes; only one or two can be decomposed"
    elif weight.ndim != 2:
        return f"its weight has {weight.ndim} axes; only a matrix can be decomposed"
    if node.op_type == "Gemm" and (
        node.attributes.get_int("transA", 0) != 0
        or node.attributes.get_float("alpha", 1.0) != 1
        or node.attributes.get_float("beta", 1.0) != 1
    ):
        return "a Gemm with transA, alpha or beta; only the plain one is taken"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = rounded_constant(node.inputs[2])
        rows_first = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
        first = 0 if rows_first else 1
        rows = weight.shape[first]
        if bias is None:
            return "its bias depends on the inputs"
        if bias.size not in (1, rows) or (bias.size == rows and bias.shape[-1] != rows):
            return f"its bias has the shape {bias.shape}; only one number an output channel is taken"
    return None


def _plain(node: ir.Node, weight: Array) -> Array:
    """Return the weight with the output channels first."""
    if node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)):
        return weight.T
    return weight


def _spec(node: ir.Node, name: str, index: int, weight: Array | None) -> LayerSpec:
    """Return what is known of a node without running it."""
    shape = (0, 0) if weight is None else weight.shape
    groups = node.attributes.get_int("group", 1) if "Conv" in node.op_type else 1
    kernel: tuple[int, ...] = ()
    kind: Kind = "linear"
    if "Conv" in node.op_type and len(shape) > 2:
        kernel = tuple(shape[2:])
        kinds = _TRANSPOSED if node.op_type == "ConvTranspose" else _CONVOLUTIONS
        kind = kinds.get(len(kernel), "conv3d")
        outputs, inputs = shape[0], shape[1] * groups
        if node.op_type == "ConvTranspose":
            outputs, inputs = shape[1] * groups, shape[0]
    elif node.op_type in ("Gemm", "QGemm") and node.attributes.get_int("transB", 0) == 1:
        outputs, inputs = shape[0], shape[-1]
    else:
        outputs, inputs = shape[-1], shape[-2] if len(shape) > 1 else 1
    return LayerSpec(
        name,
        index,
        kind,
        int(outputs),
        int(inputs),
        kernel,
        tuple(node.attributes.get_ints("strides", (1,) * len(kernel))),
        groups,
        bias=len(node.inputs) > 2 and node.inputs[2] is not None and node.op_type in _PRODUCTS,
        params=0 if weight is None else int(weight.size),
    )


def _refused(node: ir.Node, name: str, index: int, weight: Array | None, reason: str) -> Site:
    spec = replace(_spec(node, name, index, weight), refusal=reason)
    x, y = node.inputs[0], node.outputs[0]
    return Site(spec, node.op_type, (x.name if x else "") or "", y.name or "", torch.empty(0))


def _for_one(shape: tuple[int, ...], spatial: slice, batch: int) -> tuple[int, ...]:
    """Return the positions that one input of the network has in a shape, pieces of the input in front."""
    pieces = shape[0] // batch if shape[0] % batch == 0 else shape[0]
    return (*((pieces,) if pieces != 1 else ()), *shape[spatial])


def _absorber(node: ir.Node, bias: bool, spec: LayerSpec) -> Absorber | None:
    if bias:
        return "bias"
    y = node.outputs[0]
    uses = list(y.uses())
    if len(uses) != 1 or y.is_graph_output():
        return None
    behind = uses[0].node
    if is_standard(behind, "Add"):
        other = constant(behind.inputs[1 - uses[0].idx])
        if other is not None and other.size == spec.out_channels:
            channel = other.ndim - 1 if spec.kind == "linear" else other.ndim - 1 - len(spec.kernel_size)
            if 0 <= channel < other.ndim and other.shape[channel] == spec.out_channels:
                return "add"
    if is_standard(behind, "BatchNormalization") and uses[0].idx == 0 and len(behind.outputs) == 1:
        axis_fits = spec.kind != "linear" or len(spec.output_sizes[0] if spec.output_sizes else ()) == 0
        if axis_fits and constant(behind.inputs[3]) is not None:
            return "batch_norm"
    return None


def _padding(node: ir.Node, axes: int) -> tuple[tuple[tuple[int, int], ...] | None, str]:
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return None, auto_pad
    pads = [0] * (2 * axes) if auto_pad == "VALID" else node.attributes.get_ints("pads", (0,) * (2 * axes))
    return tuple((int(pads[axis]), int(pads[axes + axis])) for axis in range(axes)), "NOTSET"


def _is_float(*values: ir.Value) -> bool:
    return all(each.dtype in (None, ir.DataType.FLOAT) for each in values)
