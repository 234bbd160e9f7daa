"""Rewrite convolutions to few channels so that they compute several neighbouring positions at once.

Processors compute output channels in groups, 16 at a time with AVX-512, and a convolution to a single channel
takes as long as one to 16. Its other lanes can hold the outputs of neighbouring positions: with a kernel that
is copied for each of them, moved by a stride, and longer by as much, a convolution to c channels becomes one
to c * n channels at every n-th position, whose outputs are put side by side. That multiplies with zeros, and
is faster all the same where the kernel is long or the channels are few. No output changes but by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from decomposition.errors import PlanError
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import Array, free_name, new_constant, put_in_place, without_unused

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
