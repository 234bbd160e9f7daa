"""Recurrent layers of ONNX: listed and counted; an LSTM may compute in integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from decomposition.network.layers import LayerSpec
from rankrl.onnx.graph.quantised import constant
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array
from rankrl.onnx.operators import MICROSOFT, is_standard

RECURRENT = ("LSTM", "GRU", "RNN")
_GATES = 4
"""Rows of an LSTM's weights for each number in its state."""


def is_recurrent(node: ir.Node) -> bool:
    """Tell whether a node is a recurrent layer."""
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
    """Return an LSTM as the matrix of all rows of its weights (`Site.hidden`)."""
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
