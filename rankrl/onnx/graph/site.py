"""Represent nodes with constant weights as layers of `decomposition` (`Site`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from decomposition.network.layers import DecomposableModule, LayerSpec
from rankrl.onnx.graph_edits import MICROSOFT, Array, is_standard

Absorber = Literal["bias", "add", "batch_norm"]
"""What can take up a change of a layer's mean output: its bias, the addition or the batch norm behind it."""


@dataclass(frozen=True)
class Site:
    """A node and its weight."""

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
        """Name of the node."""
        return self.spec.name

    @property
    def channel_axis(self) -> int:
        """The axis of the output that counts its channels."""
        return -1 if self.spec.kind == "linear" else 1

    @property
    def channels(self) -> int:
        """Channels of the node's output."""
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
        """Return the layer in PyTorch, with its values and any padding.

        ONNX pads the two sides of an axis apart; users of the module pad the input, or need no padding.
        """
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
        """Return the padding before and after each spatial axis of an input of these sizes.

        Follows the specification of Conv's `pads` and `auto_pad` (ai.onnx, version 11).
        """
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
        """Return an input of the node, padded as the node does it."""
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        if self.spec.kind == "linear":
            return tensor
        widths = [width for pair in reversed(self.widths(x.shape[2:])) for width in pair]
        return nn.functional.pad(tensor, widths) if any(widths) else tensor


class SiteModules(nn.Module):
    """The sites as modules of one network, under the names of their nodes, which may hold any character.

    It cannot be run; it is what `FitLibrary` reads weights and geometries from.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = list(modules)
        self.sites = nn.ModuleList(modules.values())

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the sites by the names of their nodes."""
        return zip(self._names, self.sites, strict=True)


def foreign_weight(node: ir.Node) -> Array | None:
    """Return the weight that a node of a foreign domain holds, or None.

    It is the largest of its constants in floating point along two axes or more; biases and scales, along one,
    are none.
    """
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
