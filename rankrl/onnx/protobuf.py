"""ONNX files and the form in which they are changed: read into onnx_ir once, and written from it once."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from rankrl.onnx.set_aside import set_aside_outputs
from rankrl.onnx.sparse import store_densely


def load_model(path: str | Path) -> ir.Model:
    """Return the model of a file, with the data that lie next to it.

    Sparse constants are dense, and it ends at the tensors in front of outputs that are none.
    """
    model = onnx.load(path)
    set_aside_outputs(model)
    store_densely(model)
    return ir.from_proto(model)


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model as protobuf, for what takes nothing else: onnx's checker and converter, onnxruntime."""
    proto = ir.to_proto(model)
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}  # they say their types and sizes themselves
    values = [value for value in graph.value_info if value.name not in constants]
    if len(values) < len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(values)
    return proto


def save_model(model: ir.Model, path: str | Path) -> None:
    """Write a model as one file, unchecked."""
    onnx.save(to_proto(model), path)
