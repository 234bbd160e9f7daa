"""Export a compressed network as an ONNX file, with the integers of its plan.

The network is exported without rounding; then weights are stored in integers, and onnxruntime's quantiser
writes the integer nodes that the plan names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxruntime.quantization.quant_utils import compute_scale_zp, quantize_onnx_initializer
from torch import nn

from decomposition import integer_layers, rounded_parameters, without_rounding
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import ExampleInputs, run_model
from decomposition.network.layers import is_decomposable_module
from decomposition.network.rounding import REDUCED_BITS, largest_integer
from decomposition.network.surgery import copied
from rankrl.errors import ExportError
from rankrl.onnx.export.graph_passes import pad_channels
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.onnx_file import ExportResult, export_onnx, write_checked
from rankrl.onnx.export.static_quantiser import as_in_file, integer_bits
from rankrl.onnx.graph_edits import Array, add_constant, is_standard, names_in, new_name, node_of, put_first
from rankrl.onnx.protobuf import load_model, save_model
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, open_session

INT4_OPSET = 21
"""The first operator set in which DequantizeLinear takes INT4."""


def export_network(
    network: nn.Module,
    path: Path,
    input_shape: ExampleInputs,
    inputs: Iterable[Batch],
    *,
    opset: int | None = None,
    channel_block: int = 1,
    reduce_range: bool | None = None,
    **options: Any,
) -> ExportResult:
    """Export a network as one ONNX file, quantised as its plan says."""
    network = as_in_file(network, reduce_range)
    computing = {f"{name}.weight" for name in integer_layers(network)}
    stored = {name: bits for name, bits in rounded_parameters(network).items() if name not in computing}
    if 4 in stored.values():
        if opset is not None and opset < INT4_OPSET:
            raise ExportError(f"opset is {opset}; weights of 4 bits need {INT4_OPSET} or newer (or null).")
        opset = max(opset or 0, INT4_OPSET)
    if not (computing or stored):
        options |= {"opset": opset, "channel_block": channel_block, "progress": False}
        return export_onnx(network, path, input_shape, **options)
    with tempfile.TemporaryDirectory() as folder:  # the float32 file is never seen under the other's name
        scratch = Path(folder) / "network.onnx"
        plain = without_rounding(copied(network))
        modules = dict(plain.named_modules())
        cores = [name for name in stored if not is_decomposable_module(modules[name.rpartition(".")[0]])]
        written = export_onnx(plain, scratch, input_shape, opset=opset, keep=cores, progress=False, **options)
        if stored:
            model = load_model(scratch)
            store_integers(model, stored)
            save_model(model, scratch)
        if computing:
            reduced = REDUCED_BITS in integer_bits(network)
            quantise_onnx(scratch, scratch, inputs, weights=computing, reduce_range=reduced)
        model = load_model(scratch)
        pad_channels(model, channel_block)
        size = write_checked(model, path, f"the file of {type(network).__name__}")
    return replace(written, path=path, file_bytes=size)


def store_integers(model: ir.Model, bits: Mapping[str, int]) -> None:
    """Store weights of a float32 graph in integers, one scale an output channel."""
    graph, taken = model.graph, names_in(model.graph)
    missing = sorted(set(bits) - set(graph.initializers))
    if missing:
        raise ExportError(
            f"the weight {missing[0]!r} is no constant of the graph, so it cannot be stored in integers; "
            "leave its layer without Quantise"
        )
    for name, width in bits.items():
        weight = graph.initializers[name]
        last = any(is_standard(node, "MatMul") and index == 1 for node, index in weight.uses())
        tensor = weight.const_value
        assert tensor is not None
        axis = len(tensor.shape) - 1 if last else 0
        integers, scale = rounded_tensor(tensor, width, axis)
        integers.name, factor, back = (
            new_name(f"{name}_{kind}", taken) for kind in ("integers", "scale", "DequantizeLinear")
        )
        rounded = ir.val(integers.name, const_value=integers)
        node = node_of(
            "DequantizeLinear", [rounded, add_constant(graph, factor, scale)], back, {"axis": axis}
        )
        node.outputs[0].name = name
        weight.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        del graph.initializers[name]
        graph.register_initializer(rounded)
        put_first(graph, [node])


def rounded_tensor(tensor: ir.TensorProtocol, width: int, axis: int) -> tuple[ir.TensorProtocol, Array]:
    """Return a weight in integers of 8, 7 or 4 bits, and its scales, one for each index of an axis."""
    values = np.moveaxis(tensor.numpy(), axis, 0)
    kind, largest = ir.DataType.INT4 if width == 4 else ir.DataType.INT8, largest_integer(width)
    rows = np.abs(values.reshape(len(values), -1)).max(1)
    ends = np.array([-largest, largest], dtype=np.int8)
    pairs = [
        compute_scale_zp(-largest_weight, largest_weight, *ends, symmetric=True) for largest_weight in rows
    ]
    scale = np.array([step for _, step in pairs], dtype=np.float32).reshape(-1)
    scale[rows == 0] = 1.0
    zero = np.zeros(len(values), dtype=np.int8)
    integers = quantize_onnx_initializer(ir.to_proto(tensor), kind.value, zero, scale, axis=axis)
    return ir.from_proto(integers), scale


def class_agreement(
    network: nn.Module,
    path: Path,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    runtime: str = DEFAULT_RUNTIME,
) -> float:
    """Return the fraction of inputs on which an ONNX file and its network predict the same class."""
    session = open_session(path, runtime=runtime)
    same = total = 0
    with evaluation_mode(network), torch.no_grad():
        for images, arrays in pairs:
            expected = np.asarray(run_model(network, images).argmax(1))
            same += int((session.run(arrays.numpy())[0].argmax(1) == expected).sum())
            total += len(images)
    if total == 0:
        raise ExportError("there are no images to compare the ONNX file with its network on.")
    return same / total
