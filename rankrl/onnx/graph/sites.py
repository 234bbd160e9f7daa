"""Find the nodes with weights in a graph as layers of `decomposition`: geometry, cost, refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from decomposition.network.layers import (
    FLOAT_BYTES,
    OPAQUE_KINDS,
    DecomposableModule,
    Kind,
    LayerSpec,
    Storage,
)
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
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
from rankrl.onnx.graph_edits import MICROSOFT, Array, depending, is_standard, until

Absorber = Literal["bias", "add", "batch_norm"]
"""The place that can absorb a change of a layer's mean output: its bias, an addition or a batch norm."""


@dataclass(frozen=True)
class Site:
    spec: LayerSpec
    op_type: str
    input_name: str
    output_name: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    pads: tuple[tuple[int, int], ...] | None = ()
    auto_pad: str = "NOTSET"
    dilation: tuple[int, ...] = ()
    absorber: Absorber | None = None
    weight_name: str = ""
    bias_name: str = ""
    twins: tuple[Site, ...] = ()
    spread: tuple[int, ...] = ()
    hidden: int = 0
    narrow: Mapping[str, ir.DataType] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[Site, ...]:
        """All nodes with this weight, in the order of the graph."""
        return (self, *self.twins)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def channel_axis(self) -> int:
        return -1 if self.spec.kind == "linear" else 1

    @property
    def channels(self) -> int:
        return self.spec.out_channels // math.prod(self.spread)

    def spread_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight (out * kernel, in, ...) as a transposed convolution has it: (in, out, *kernel)."""
        return weight.flatten(1).T.reshape(-1, self.channels, *self.spread)

    def recurrent_weights(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a weight of an LSTM as the node has it, on its inputs and on its state."""
        inputs = self.spec.in_channels - self.hidden
        on_inputs, on_state = weight.reshape(2, -1, 4 * self.hidden, weight.shape[-1])
        return on_inputs[..., :inputs], on_state[..., : self.hidden]

    def module(self, padding: Sequence[int] | int = 0) -> DecomposableModule:
        """Return the layer in PyTorch, with any padding: ONNX pads the two sides of an axis apart."""
        spec, bias = self.spec, self.bias is not None
        layer: DecomposableModule
        if spec.kind == "linear" or self.hidden:
            layer = nn.Linear(self.weight.shape[1], len(self.weight), bias=bias)
        else:
            kind = nn.Conv1d if len(spec.kernel_size) == 1 else nn.Conv2d
            sizes: dict[str, Any] = {"stride": spec.stride, "dilation": self.dilation}
            sizes["padding"] = padding if isinstance(padding, int) else tuple(padding)
            kernel: Any = spec.kernel_size
            layer = kind(spec.in_channels, spec.out_channels, kernel, bias=bias, **sizes)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            if self.bias is not None:
                cast(torch.Tensor, layer.bias).copy_(self.bias)
        return layer.eval()

    def widths(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the padding of each spatial axis of these sizes (ai.onnx, Conv, version 11)."""
        if self.pads is not None:
            return list(self.pads)
        widths = []
        for size, kernel, stride, dilation in zip(
            sizes, self.spec.kernel_size, self.spec.stride, self.dilation, strict=True
        ):
            total = max(0, (math.ceil(size / stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
            small, large = total // 2, total - total // 2
            widths.append((small, large) if self.auto_pad == "SAME_UPPER" else (large, small))
        return widths

    def counting_axis(self, shape: Sequence[int], batch: int) -> int:
        """Return the batch axis of the node's input; a time axis may precede it."""
        if self.spec.kind != "linear" or batch == 1:
            return 0
        sizes = self.spec.input_sizes[0]  # for one input of the network
        one = sizes if len(sizes) == len(shape) - 1 else (1, *sizes)
        grown = [size == batch * single for size, single in zip(shape, one, strict=False)]
        return grown.index(True) if any(grown) else 0

    def padded(self, x: Array) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        if self.spec.kind == "linear":
            return tensor
        widths = [width for pair in reversed(self.widths(x.shape[2:])) for width in pair]
        return nn.functional.pad(tensor, widths) if any(widths) else tensor


class SiteModules(nn.Module):
    """The sites as modules of one network, by the names of their nodes, for `FitLibrary` to read."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = list(modules)
        self.sites = nn.ModuleList(modules.values())

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return zip(self._names, self.sites, strict=True)


def foreign_weight(node: ir.Node) -> Array | None:
    if is_standard(node):
        return None
    tensors = [ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point()]
    weights = [array for array in arrays if np.sum(np.array(array.shape) > 1) > 1]
    return max(weights, key=lambda array: array.size, default=None)


def is_foreign(node: ir.Node | None) -> bool:
    """Tell whether a node holds a weight without being an operator of ONNX."""
    return node is not None and foreign_weight(node) is not None


def foreign_reason(node: ir.Node) -> str:
    if node.domain == MICROSOFT or node.domain.startswith(f"{MICROSOFT}."):
        return (
            f"it is onnxruntime's own {node.op_type} ({node.domain}); give the file from before onnxruntime "
            "optimised it"
        )
    return (
        f"it is no operator of ONNX but {node.op_type} of the domain {node.domain!r}; export the network to "
        "ONNX's own operators"
    )


RECURRENT = ("LSTM", "GRU", "RNN")
_GATES = 4
"""Rows of an LSTM's weights for each number in its state."""


def is_recurrent(node: ir.Node) -> bool:
    return is_standard(node, *RECURRENT) or _is_dynamic(node)


def recurrent_weight(node: ir.Node) -> Array | None:
    """Return a recurrent layer's weights on its inputs and on its state, side by side."""
    arrays = [constant(node.inputs[index]) for index in (1, 2)]
    known = [array for array in arrays if array is not None]
    if len(known) < len(arrays):
        return None
    if _is_dynamic(node):
        known = [array.transpose(0, 2, 1) for array in known]
    return np.concatenate(known, -1)


def recurrent_reason(node: ir.Node, weight: Array | None, *, inside: bool) -> str | None:
    """Return why a recurrent layer stays as it is, None where it may compute in integers."""
    if _is_dynamic(node):
        return "it computes in integers already"
    if node.op_type != "LSTM":
        return (
            f"its weights are applied anew at every step of a sequence inside one node ({node.op_type}): an "
            "error would feed back on itself, which no fit accounts for; onnxruntime has no integers for it"
        )
    if inside:
        return "it lies in the body of an If, Loop or Scan, or in a function"
    if weight is None:
        return "its weights are computed"
    return None if weight.dtype == np.float32 else f"its weight is {weight.dtype}; only float32 is taken"


def lstm_site(node: ir.Node, spec: LayerSpec, weight: Array) -> Site:
    """Return an LSTM as a site whose weight is the matrix of all rows of its weights (`Site.hidden`)."""
    directions, rows, _ = weight.shape
    hidden = rows // _GATES
    parts = [weight[..., :-hidden], weight[..., -hidden:]]
    width = max(part.shape[-1] for part in parts)
    matrix = np.zeros((2, directions, rows, width), np.float32)
    for filled, part in zip(matrix, parts, strict=True):
        filled[..., : part.shape[-1]] = part
    return Site(
        replace(spec, out_channels=directions * rows, bias=False),
        node.op_type,
        str(node.inputs[0].name) if node.inputs[0] is not None else "",
        next(str(output.name) for output in node.outputs if output.name),
        torch.from_numpy(matrix.reshape(-1, width)),
        hidden=hidden,
    )


def counted_recurrent(spec: LayerSpec, shape: Sequence[int], batch: int) -> LayerSpec:
    """Return a recurrent layer with its positions and multiply-accumulates for one input of the network."""
    positions = math.prod(shape[:2])
    sizes = ((max(1, positions // batch),),)
    return replace(spec, macs=positions * spec.params // batch, input_sizes=sizes, output_sizes=sizes)


def _is_dynamic(node: ir.Node) -> bool:
    return node.op_type == "DynamicQuantizeLSTM" and node.domain == MICROSOFT


PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that may hold a weight."""
_RECURRENT: dict[str, Kind] = {"LSTM": "lstm", "DynamicQuantizeLSTM": "lstm", "GRU": "gru", "RNN": "rnn"}
_CONVOLUTIONS: dict[int, Kind] = {1: "conv1d", 2: "conv2d", 3: "conv3d"}
_TRANSPOSED: dict[int, Kind] = {1: "conv_transpose1d", 2: "conv_transpose2d", 3: "conv_transpose3d"}


def layer_spec(node: ir.Node, name: str, index: int, weight: Array | None) -> LayerSpec:
    """Return the geometry of a node as far as it is known without running it."""
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
    elif is_recurrent(node):
        kind = _RECURRENT[node.op_type]
        outputs, inputs = shape[-2:]
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
        bias=len(node.inputs) > 2 and node.inputs[2] is not None and node.op_type in PRODUCTS,
        params=0 if weight is None else int(weight.size),
    )


def weight_matrix(node: ir.Node, weight: Array) -> Array:
    """Return the weight with the output channels first."""
    if node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)):
        return weight.T
    return weight


def refusal_of(node: ir.Node, weight: Array) -> str | None:
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


def absorber_of(node: ir.Node, spec: LayerSpec) -> Absorber | None:
    """Return the parameter that can take up a change of a node's mean output, None without one."""
    if spec.bias:
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


def padding_of(node: ir.Node, axes: int) -> tuple[tuple[tuple[int, int], ...] | None, str]:
    """Return a convolution's padding before and after each spatial axis (None: automatic), and `auto_pad`."""
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return None, auto_pad
    pads = [0] * (2 * axes) if auto_pad == "VALID" else node.attributes.get_ints("pads", (0,) * (2 * axes))
    return tuple((int(pads[axis]), int(pads[axes + axis])) for axis in range(axes)), "NOTSET"


def sizes_for_one(shape: tuple[int, ...], spatial: slice, batch: int) -> tuple[int, ...]:
    """Return the sizes of one input's positions in a shape, with the number of its pieces in front."""
    pieces = shape[0] // batch if shape[0] % batch == 0 else shape[0]
    return (*((pieces,) if pieces != 1 else ()), *shape[spatial])


def absorbing(value: ir.Value, site: Site) -> tuple[ir.Node, int, int]:
    """Return the node that takes up a change of a value's mean, with the input and the sign by which."""
    use = next(iter(value.uses()))
    normalises = site.absorber == "batch_norm"  # its third input is the mean that it takes away
    return use.node, 3 if normalises else 1 - use.idx, -1 if normalises else 1


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
