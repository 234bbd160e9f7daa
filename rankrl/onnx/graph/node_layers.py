"""Represent nodes with constant weights as layers of `decomposition`: geometry, cost, refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from decomposition.network.layers import DecomposableModule, Kind, LayerSpec
from rankrl.onnx.graph.precisions import constant, rounded_constant
from rankrl.onnx.graph_edits import MICROSOFT, Array, is_standard

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
    """Return the weight that a node of a foreign domain holds, or None."""
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
    """Return why a node of a foreign domain stays as it is, and what to do about it."""
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
