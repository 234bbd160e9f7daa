"""Replace nodes by the stages of compressed layers, or by nodes that compute several positions at once.

Processors compute output channels in groups, 16 at a time with AVX-512, and a convolution to a single channel
takes as long as one to 16. Its other lanes can hold the outputs of neighbouring positions: with a kernel that
is copied for each of them, moved by a stride, and longer by as much, a convolution to c channels becomes one
to c * n channels at every n-th position, whose outputs are put side by side. That multiplies with zeros, and
is faster all the same where the kernel is long or the channels are few. No output changes but by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from decomposition import TensorFormat, compressible_layers, get_format, list_formats
from decomposition.errors import PlanError
from decomposition.formats.layers import FactorisedLayer, Reshape, plain_layers
from rankrl.errors import ConfigError
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.precisions import constant
from rankrl.onnx.graph.sites import Site, absorbing
from rankrl.onnx.graph_edits import (
    Array,
    add_constant,
    free_name,
    is_standard,
    names_in,
    new_constant,
    new_name,
    node_of,
    put_first,
    put_in_place,
    stored,
    without_unused,
)

MARKED = 1
"""The padding of modules that are handed to fits: where a stage has it, the node's own goes."""


def writable_formats() -> list[str]:
    """List the formats whose layers, or some of them, are convolutions, products and reshapes in a row."""
    return [name for name in list_formats() if _runs_in_a_row(get_format(name))]


@cache
def _runs_in_a_row(tensor_format: TensorFormat) -> bool:
    """Try whether the `row` of a format's layers, with and without a kernel, computes the same."""
    found = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for dense, shape in ((nn.Conv2d(4, 6, 3, (2, 1), 1), (4, 5, 4)), (nn.Linear(4, 6), (4,))):
            (spec,) = compressible_layers(nn.Sequential(dense), shape)
            modes = tensor_format.modes(spec)
            layer = tensor_format.build(dense, spec, modes, tensor_format.expand(modes, 2)).double().eval()
            for parameter in layer.parameters():
                parameter.normal_()
            x = torch.randn(2, *shape, dtype=torch.float64)
            expected, stages = layer.to_dense()(x), layer.row()
            if not stages:
                continue  # layers of this kind are left out
            found = True
            try:
                y = nn.Sequential(*stages)(x)
            except RuntimeError:  # the channels of neighbours do not meet
                return False
            if y.shape != expected.shape or not torch.allclose(y, expected):
                return False
    return found


def check_formats(names: Sequence[str]) -> None:
    for name in names:
        get_format(name)  # an unknown one has a message of its own
        if name not in writable_formats():
            raise ConfigError(
                f"decomposition={name} cannot be written into an ONNX graph: its cores are contracted while "
                "it runs, or its stages are no plain convolutions and matrix products in a row. Choose from "
                f"{', '.join(writable_formats())}, or several of them with decomposition=auto"
            )


def replace_node(
    model: ir.Model, site: Site, layers: Sequence[nn.Module], shift: torch.Tensor | None
) -> dict[str, ir.Value]:
    """Replace a node, and all that share its weight, by a layer; return the new constants by key."""
    constants: dict[str, ir.Value] = {}
    for node, layer in zip(site.nodes, layers, strict=True):
        _Replacement(model.graph, node, constants).put(layer, shift)
    return constants


@dataclass(frozen=True)
class _Replacement:
    """Replaces one node; `constants` are those of earlier nodes that share the weight."""

    graph: ir.Graph
    site: Site
    constants: dict[str, ir.Value]

    def put(self, layer: nn.Module, shift: torch.Tensor | None) -> None:
        """Put a layer, with the shift of its mean, in the place of the node."""
        graph, site = self.graph, self.site
        node = next(node for node in graph if node.name == site.name)
        stages = layer.row() if isinstance(layer, FactorisedLayer) else list(plain_layers(layer).values())
        x, old = node.inputs[0], node.outputs[0]
        assert x is not None
        if shift is not None and site.absorber in ("add", "batch_norm"):
            self.constants["shifted"] = _shift_behind(graph, old, site, shift)
        nodes: list[ir.Node] = []
        for number, stage in enumerate(stages):
            last = number == len(stages) - 1
            name = site.name
            if len(stages) > 1:
                kind = layer.tensor_format.name if isinstance(layer, FactorisedLayer) else "dense"
                name = free_name(graph, f"{site.name}/{kind}_{number}")
            bias: torch.Tensor | None = stage.bias  # type: ignore[assignment]
            if last and bias is not None and shift is not None and site.absorber == "bias":
                bias = bias.detach() + shift.to(bias)
            key = f"stage {number}"
            if isinstance(stage, Reshape):
                nodes += self._reshapes(stage, bias, x, node.inputs[0] if last else None, name, key)
            else:
                spreading = node if last and site.spread else None
                nodes.append(self._stage_node(stage, bias, x, name, key, spreading))
            x = nodes[-1].outputs[0]
        put_in_place(graph, [node], nodes)

    def _known(self, key: str, name: str, values: npt.ArrayLike) -> ir.Value:
        """Return the constant that is known by a key; store it where none is."""
        if key not in self.constants:
            self.constants[key] = new_constant(self.graph, name, values)
        return self.constants[key]

    def _stage_node(
        self,
        stage: nn.Module,
        bias: torch.Tensor | None,
        x: ir.Value,
        name: str,
        key: str,
        spreading: ir.Node | None,
    ) -> ir.Node:
        """Return the node of a stage; as the last one of a transposed convolution it spreads positions."""
        site = self.site
        weight: torch.Tensor = stage.weight.detach()  # type: ignore[operator]
        attributes: dict[str, Any] = {}
        op_type = "Conv"
        if spreading is not None:
            op_type, weight = "ConvTranspose", site.spread_weight(weight)
            attributes = dict(spreading.attributes)
        elif isinstance(stage, nn.Conv1d | nn.Conv2d):
            attributes = {
                "kernel_shape": list(stage.kernel_size),
                "strides": list(stage.stride),
                "dilations": list(stage.dilation),
                "group": stage.groups,
            }
            marked = [padding == MARKED for padding in stage.padding]
            if not any(marked):
                attributes["pads"] = [0] * 2 * len(marked)
            elif site.pads is None:
                attributes["auto_pad"] = site.auto_pad
            else:
                pairs = [pair if here else (0, 0) for pair, here in zip(site.pads, marked, strict=True)]
                attributes["pads"] = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        elif site.op_type == "Gemm":
            op_type, attributes = "Gemm", {"transB": 1}
        else:
            op_type, weight = "MatMul", weight.T
        inputs = [x, self._known(f"{key} weight", f"{name}.weight", weight)]
        if bias is not None:
            inputs.append(self._known(f"{key} bias", f"{name}.bias", bias.detach()))
        elif spreading is not None:
            inputs += [value for value in spreading.inputs[2:] if value is not None]
        node = ir.node(op_type, inputs, attributes, name=name)
        node.outputs[0].name = free_name(self.graph, f"{name}_output")
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        return node

    def _reshapes(
        self,
        stage: Reshape,
        bias: torch.Tensor | None,
        x: ir.Value,
        given: ir.Value | None,
        name: str,
        key: str,
    ) -> list[ir.Node]:
        """Return the nodes of a reshape; the last one restores the axes of the site's input, if given."""
        graph, site = self.graph, self.site
        nodes: list[ir.Node] = []

        def append(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
            own = free_name(graph, f"{name}/{op_type}_{len(nodes)}")
            nodes.append(node_of(op_type, inputs, own, attributes))
            return nodes[-1].outputs[0]

        for shape in stage.shapes:
            x = append("Reshape", x, new_constant(graph, f"{name}.shape", np.array(shape)))
        if bias is not None:
            held = bias.detach().reshape(-1, *[1] * len(site.spec.kernel_size))
            x = append("Add", x, self._known(f"{key} bias", f"{name}.bias", held))
        rank = None if given is None or given.shape is None else len(given.shape)
        if given is not None and site.op_type == "MatMul" and rank != 2:
            first, last = (new_constant(graph, f"{name}.axis", np.array([axis])) for axis in (0, -1))
            axes = append("Slice", append("Shape", given), first, last)
            x = append("Reshape", x, append("Concat", axes, last, axis=0))
        return nodes


@dataclass(frozen=True)
class OpenConstants:
    """Names of a node's own constants (weight, bias), by which other values replace them."""

    weight: str
    turned: bool = False
    mean: str = ""
    known: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sign: int = 1
    state: str = ""


def open_constants(model: ir.Model, site: Site) -> OpenConstants:
    """Give the nodes of a site constants of their own, without changing the graph's outputs."""
    nodes = {node.name: node for node in model.graph}
    node = nodes[site.name]
    if site.hidden:
        held_weights = zip(("weight", "state"), site.recurrent_weights(site.weight), strict=True)
        values = [new_constant(model.graph, f"{site.name}.{kind}", array) for kind, array in held_weights]
        for index, value in enumerate(values, start=1):
            node.replace_input_with(index, value)
        return OpenConstants(str(values[0].name), state=str(values[1].name))
    held = constant(node.inputs[1])
    assert held is not None
    weight = new_constant(model.graph, f"{site.name}.weight", torch.from_numpy(np.array(held)))
    for twin in site.nodes:
        nodes[twin.name].replace_input_with(1, weight)
    if site.spread:
        return OpenConstants(str(weight.name))
    rows_first = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    turned = site.spec.kind == "linear" and not rows_first
    if site.absorber is None:
        return OpenConstants(str(weight.name), turned)
    if site.absorber == "bias":
        assert site.bias is not None
        known, sign = site.bias, 1
        users = [(nodes[twin.name], 2) for twin in site.nodes]
    else:
        behind, index, sign = absorbing(node.outputs[0], site)
        array = constant(behind.inputs[index])
        assert array is not None
        known, users = torch.from_numpy(np.array(array)), [(behind, index)]
    mean = new_constant(model.graph, f"{site.name}.mean", known)
    for user, index in users:
        user.replace_input_with(index, mean)
    return OpenConstants(str(weight.name), turned, str(mean.name), known, sign)


def _shift_behind(graph: ir.Graph, value: ir.Value, site: Site, shift: torch.Tensor) -> ir.Value:
    """Subtract a shift of a node's mean in the addition or batch normalisation behind it."""
    behind, index, sign = absorbing(value, site)
    known = constant(behind.inputs[index])
    assert known is not None
    moved: Array = known + sign * shift.numpy().reshape(known.shape)
    tensor = torch.from_numpy(np.ascontiguousarray(moved.astype(known.dtype)))
    moved_constant = new_constant(graph, f"{site.name}.shifted", tensor)
    behind.replace_input_with(index, moved_constant)
    return moved_constant


def store_pivoted(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Store only the non-identity rows of pivoting factorisations; return their names by the weights'."""
    graph, taken = model.graph, names_in(model.graph)
    others_of: dict[str, str] = {}
    for name in names:
        value = graph.initializers[name]
        array = stored(value)
        assert array is not None
        turned = any(is_standard(node, "MatMul") for node, _ in value.uses())
        matrix = array.T if turned else array.reshape(array.shape[:2])
        rank = matrix.shape[1]
        first = _identity_rows(matrix)
        others = np.setdiff1d(np.arange(len(matrix)), first)

        def constant(kind: str, numbers: Array, name: str = name) -> ir.Value:
            return add_constant(graph, new_name(f"{name}_{kind}", taken), numbers)

        def node(op_type: str, inputs: Sequence[ir.Value], name: str = name, **attributes: int) -> ir.Node:
            return node_of(op_type, inputs, new_name(f"{name}_{op_type}", taken), attributes)

        zeros = node("ConstantOfShape", [constant("sizes", np.array([rank, rank]))])
        zeros.attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1, array.dtype))))
        identity = node("EyeLike", [zeros.outputs[0]])
        stored_rows = constant("rows", matrix[others])
        others_of[name] = str(stored_rows.name)
        rows = node("Concat", [identity.outputs[0], stored_rows], axis=0)
        order = np.concatenate([first, others]).argsort().astype(np.int32)
        nodes = [zeros, identity, rows, node("Gather", [rows.outputs[0], constant("order", order)], axis=0)]
        if turned:
            nodes.append(node("Transpose", [nodes[-1].outputs[0]]))
        elif array.ndim > 2:
            shape = constant("shape", np.array(array.shape))
            nodes.append(node("Reshape", [nodes[-1].outputs[0], shape]))
        value.replace_all_uses_with(nodes[-1].outputs[0])
        del graph.initializers[name]
        put_first(graph, nodes)
    return others_of


def _identity_rows(matrix: Array) -> Array:
    """Return for each row of the identity the index of the first equal row of a matrix (out, r)."""
    units = np.flatnonzero(((matrix == 0) | (matrix == 1)).all(1) & (matrix.sum(1) == 1))
    places = matrix[units].argmax(1)
    return np.array([units[np.flatnonzero(places == column)[0]] for column in range(matrix.shape[1])])


METADATA = "several_positions"
"""Under which a plan's metadata say what was rewritten in the network that it is for."""


@dataclass(frozen=True)
class SeveralPositions:
    """The axis, and the number of positions along it, that a convolution computes at once."""

    axis: int
    positions: int


PositionsByNode = Mapping[str, SeveralPositions]
"""How convolutions compute several positions at once, by the names of their nodes."""


def with_several_positions(network: OnnxNetwork, sites: Sequence[Site], ways: PositionsByNode) -> OnnxNetwork:
    """Return a network in which some convolutions compute several positions at once."""
    if not ways:
        return network
    model = network.graph_model()
    for site in sites:
        if site.name in ways:
            constants: dict[str, ir.Value] = {}
            for node_site in site.nodes:
                _replace(model.graph, node_site, site, ways[site.name], constants)
    return network.rewritten(without_unused(model))


def possible_positions(network: OnnxNetwork, site: Site, group: int) -> list[SeveralPositions]:
    """List the ways in which a node can compute several positions at once; none for most nodes."""
    axes = network.axes.inputs
    fixed = all(
        size is not None or axis == axes[entry.name]
        for entry in network.inputs
        for axis, size in enumerate(entry.shape)
    )
    spec = site.spec
    if not fixed or site.op_type != "Conv" or spec.refusal is not None or len(spec.kernel_size) > 2:
        return []
    counts = [2**power for power in range(1, group.bit_length()) if 2**power * spec.out_channels <= group]
    return [
        SeveralPositions(axis, count)
        for axis, count in product(range(len(spec.kernel_size)), counts)
        if spec.kernel_size[axis] > 1  # a lane whose kernel shares no input with another's saves nothing
        and all(
            node_site.dilation[axis] == 1 and _sizes(node_site)[axis] >= count for node_site in site.nodes
        )
    ]


def to_metadata(ways: PositionsByNode) -> dict[str, dict[str, int]]:
    """Return the rewriting of convolutions as JSON values, for a plan's metadata."""
    return {name: asdict(way) for name, way in ways.items()}


def from_metadata(values: object, network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, SeveralPositions]:
    """Read the values of `to_metadata` from a plan, and check them against the nodes."""
    if not isinstance(values, Mapping):
        raise PlanError(
            f"the plan's metadata hold {values!r} as {METADATA!r}, where names of nodes belong, each "
            "with its axis and positions; remove it from them"
        )
    by_name = {site.name: site for site in sites}
    ways: dict[str, SeveralPositions] = {}
    for name, entry in values.items():
        site, way = by_name.get(name), _from_json(entry)
        lanes = 0 if site is None or way is None else max(0, way.positions) * site.spec.out_channels
        if site is None or way is None or way not in possible_positions(network, site, lanes):
            raise PlanError(
                f"the plan's metadata say of {network.source} that {name!r} computes several positions at "
                f"once, {entry!r}, which it cannot; remove {METADATA!r} from them, or use the file that the "
                "plan was made for"
            )
        ways[name] = way
    return ways


def _from_json(value: object) -> SeveralPositions | None:
    if not isinstance(value, Mapping) or set(value) != {"axis", "positions"}:
        return None
    if any(type(number) is not int for number in value.values()):
        return None
    return SeveralPositions(**value)


def _sizes(site: Site) -> tuple[int, ...]:
    return site.spec.output_sizes[0][-len(site.spec.kernel_size) :]


def _replace(
    graph: ir.Graph, node_site: Site, site: Site, way: SeveralPositions, constants: dict[str, ir.Value]
) -> None:
    """Replace one node by nodes that compute several positions at once."""
    node = next(node for node in graph if node.name == node_site.name)
    x = node.inputs[0]
    assert x is not None
    axis, count, spec = way.axis, way.positions, node_site.spec
    stride, sizes = spec.stride[axis], _sizes(node_site)
    missing = -sizes[axis] % count
    weight = _copied(site, stride, way)
    name = f"{site.name}.positions"
    bias = np.zeros(spec.out_channels, np.float32) if site.bias is None else site.bias.numpy()
    # Nodes with one weight may have strides of their own.
    for kind, array in ((f"weight_{stride}", weight), ("bias", bias.repeat(count))):
        if kind not in constants:
            constants[kind] = new_constant(graph, f"{name}_{kind}", array)
    pads = node_site.widths(spec.input_sizes[0][-len(sizes) :])
    pads[axis] = (pads[axis][0], pads[axis][1] + missing * stride)
    attributes: dict[str, Any] = {
        "kernel_shape": list(weight.shape[2:]),
        "strides": [size * count if index == axis else size for index, size in enumerate(spec.stride)],
        "dilations": list(node_site.dilation),
        "pads": [before for before, _ in pads] + [after for _, after in pads],
        "group": 1,
    }
    whole = list(sizes)
    whole[axis] += missing
    # (batch, channels * count, ..., n / count, ...) to (batch, channels, ..., n, ...)
    behind = [size for size in [math.prod(whole[axis + 1 :])] if size > 1]
    apart, order = [0, spec.out_channels, count, -1, *behind], [0, 1, 3, 2, 4][: 4 + len(behind)]
    steps: list[tuple[str, list[ir.Value], dict[str, Any]]] = [
        ("Conv", [constants[f"weight_{stride}"], constants["bias"]], attributes),
        ("Reshape", [_integers(graph, f"{name}_apart", apart)], {}),
        ("Transpose", [], {"perm": order}),
        ("Reshape", [_integers(graph, f"{name}_together", [0, spec.out_channels, *whole])], {}),
    ]
    if missing:
        ends = {"start": 0, "end": sizes[axis], "axis": 2 + axis}
        steps.append(("Slice", [_integers(graph, f"{name}_{key}", [end]) for key, end in ends.items()], {}))
    nodes: list[ir.Node] = []
    for number, (op_type, operands, settings) in enumerate(steps):
        own = node_site.name if number == 0 else free_name(graph, f"{node_site.name}/positions_{number}")
        nodes.append(ir.node(op_type, [x, *operands], settings, name=own))
        x = nodes[-1].outputs[0]
        x.name, x.type = free_name(graph, f"{own}_output"), ir.TensorType(ir.DataType.FLOAT)
    put_in_place(graph, [node], nodes)


def _copied(site: Site, stride: int, way: SeveralPositions) -> Array:
    """Return a weight with a copy of every kernel for each position, moved by the stride."""
    weight = np.moveaxis(site.weight.numpy(), 2 + way.axis, -1)
    outputs, *others, length = weight.shape
    copies = np.zeros((outputs, way.positions, *others, length + (way.positions - 1) * stride), np.float32)
    for position in range(way.positions):
        copies[:, position, ..., position * stride : position * stride + length] = weight
    return np.moveaxis(copies.reshape(-1, *copies.shape[2:]), -1, 2 + way.axis)


def _integers(graph: ir.Graph, name: str, values: Sequence[int]) -> ir.Value:
    return new_constant(graph, name, np.array(values, np.int64))
