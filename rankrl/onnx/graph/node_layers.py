"""Describe nodes as layers (convolutions, matrix products, recurrent nodes): geometry, cost, refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from decomposition.network.layers import Kind, LayerSpec
from rankrl.onnx.graph.precisions import constant, rounded_constant
from rankrl.onnx.graph.site import Absorber, Site
from rankrl.onnx.graph_edits import MICROSOFT, Array, is_standard

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
