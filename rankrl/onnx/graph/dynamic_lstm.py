"""LSTM nodes that multiply 8-bit integers: onnxruntime's DynamicQuantizeLSTM in their place.

Specification: ContribOperators.md of onnxruntime. Inputs and states are rounded to uint8 at every step, in
ranges that the kernel finds there; weights are int8, one scale for each row of a gate. There is no such
kernel for GRU and RNN, which onnxruntime's own dynamic quantiser leaves alone, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rankrl.onnx.export.network_file import rounded_tensor
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array, new_constant, without_unused
from rankrl.onnx.operators import MICROSOFT

_PLACES = {"weight": 1, "state": 2}
"""Which inputs are the weights."""
_OTHERS = 8
"""Inputs of an LSTM, those that it does without among them; scales and zero points come after them."""


def quantise_lstms(model: ir.Model, lstms: Sequence[tuple[Site, int]]) -> None:
    """Let LSTM nodes multiply integers."""
    graph, nodes = model.graph, {node.name: node for node in model.graph}
    for site, bits in lstms:
        node = nodes[site.name]
        inputs = [*node.inputs, *[None] * (_OTHERS - len(node.inputs))]
        for (kind, place), weight in zip(_PLACES.items(), site.recurrent_weights(site.weight), strict=True):
            integers, scales = _rounded(weight.numpy(), bits)
            inputs[place] = new_constant(graph, f"{site.name}.{kind}_integers", integers)
            zeros = np.zeros(scales.shape, np.int8)
            inputs += [
                new_constant(graph, f"{site.name}.{kind}_{what}", values)
                for what, values in (("scales", scales), ("zeros", zeros))
            ]
        attributes = [value for key, value in node.attributes.items() if key != "layout"]
        outputs = [ir.Value(name=old.name, type=old.type, shape=old.shape) for old in node.outputs]
        dynamic = ir.Node(
            MICROSOFT, "DynamicQuantizeLSTM", inputs, attributes, name=node.name, outputs=outputs
        )
        ir.convenience.replace_nodes_and_values(graph, node, [node], [dynamic], node.outputs, outputs)
    if lstms:
        model.opset_imports.setdefault(MICROSOFT, 1)
        without_unused(model)


def _rounded(weight: Array, bits: int) -> tuple[Array, Array]:
    """Return a weight in integers, as the kernel takes it (directions, columns, rows), and its scales."""
    directions, rows, columns = weight.shape
    integers, scales = rounded_tensor(ir.tensor(weight.reshape(-1, columns)), bits, 0)
    turned = integers.numpy().reshape(weight.shape).transpose(0, 2, 1)
    return np.ascontiguousarray(turned), scales.reshape(directions, rows)
