"""Replace nodes of a graph by the stages of compressed layers, with constants that can be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from decomposition import TensorFormat, compressible_layers, get_format, list_formats
from decomposition.formats.layers import FactorisedLayer, Reshape, plain_layers
from rankrl.errors import ConfigError
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
