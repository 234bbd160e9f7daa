"""Write small networks side by side into one ONNX file, to time them.

Layers that are convolutions and matrix products in a row are written node by node: tracing them with torch's
exporter takes longer than timing them. Other modules (a contraction, a sum) are exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from decomposition.formats.layers import FactorisedLayer, plain_layers
from decomposition.network.layers import DecomposableModule, is_decomposable_module
from rankrl.onnx.export.onnx_file import OLDEST_OPSET, export_onnx
from rankrl.onnx.graph_edits import add_constant, node_of
from rankrl.onnx.protobuf import save_model


class SideBySide(nn.Module):
    """Networks side by side, each with an output of its own; behind every layer is a ReLU."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of every network on one input."""
        outputs = []
        for network in self.networks:
            y = x
            for layer in network.children():
                y = torch.relu(layer(y))
            outputs.append(y)
        return tuple(outputs)

    def save(self, path: Path, shape: tuple[int, ...]) -> None:
        """Write the networks as one ONNX file; weights are called as in the module."""
        if all(map(_in_a_row, self.modules())):
            save_model(self._model(shape), path)
        else:
            sample = torch.zeros(shape)
            export_onnx(self, path, shape[1:], sample=sample, dynamic_batch=False, progress=False)

    def _model(self, shape: tuple[int, ...]) -> ir.Model:
        x = ir.val("input", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph = ir.Graph([x], [], nodes=[], name="layers", opset_imports={"": OLDEST_OPSET})
        names = {module: name for name, module in self.named_modules()}
        for network, module in self.networks.named_children():
            y = x
            for layer in module.children():
                for part, stage in plain_layers(layer).items():
                    y = _append(graph, y, stage, ".".join(filter(None, (names[layer], part))))
                relu = node_of("Relu", [y], f"{names[layer]}.relu")
                graph.append(relu)
                y = relu.outputs[0]
            y.name, y.type = f"output_{network}", x.type
            with torch.no_grad():
                y.shape = ir.Shape(module(torch.zeros(shape)).shape)
            graph.outputs.append(y)
        return ir.Model(graph, ir_version=onnx.IR_VERSION_2023_5_5)


def _in_a_row(module: nn.Module) -> bool:
    """Tell whether a module's layers are one behind the other, each a convolution or matrix product."""
    if isinstance(module, FactorisedLayer):
        return module.execution != "dense" and bool(module.plain_layers())
    return isinstance(module, SideBySide | nn.ModuleList | nn.Sequential) or is_decomposable_module(module)


def _append(graph: ir.Graph, x: ir.Value, stage: DecomposableModule, name: str) -> ir.Value:
    """Add the node of a convolution or matrix product; return its output."""
    inputs, attributes = [x, add_constant(graph, f"{name}.weight", _array(stage.weight))], dict[str, Any]()
    if stage.bias is not None:
        inputs.append(add_constant(graph, f"{name}.bias", _array(stage.bias)))
    op_type = "Gemm"
    if isinstance(stage, nn.Linear):
        attributes = {"transB": 1}
    else:
        op_type = "Conv"
        attributes = {
            "kernel_shape": list(stage.kernel_size),
            "strides": list(stage.stride),
            "dilations": list(stage.dilation),
            "group": stage.groups,
            "pads": 2 * list(stage.padding),
        }
    node = node_of(op_type, inputs, name, attributes)
    graph.append(node)
    return node.outputs[0]


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()
