"""Sparse constants of a file, turned into dense tensors and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rankrl.onnx.errors import ExportError
from rankrl.onnx.operators import STANDARD

_MOST_BYTES = 2**31 - 1
"""What one protobuf message can hold, a whole network."""


def store_densely(model: onnx.ModelProto) -> dict[str, onnx.SparseTensorProto]:
    """Turn sparse constants into dense ones, initializers and those of `Constant` nodes alike.

    onnx_ir knows no sparse constants, so this precedes the conversion of a model to it.
    """
    found: dict[str, onnx.SparseTensorProto] = {}

    def densely(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
        itemsize = helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
        size = math.prod(sparse.dims) * itemsize
        if model.ByteSize() + size > _MOST_BYTES:
            raise ExportError(
                f"the sparse constant {name!r} of shape {tuple(sparse.dims)} takes {size:,} bytes when it is "
                "dense; networks of up to 2 GiB are read"
            )
        if main:
            found[name] = onnx.SparseTensorProto()
            found[name].CopyFrom(sparse)
        return dense(sparse, name)

    for number, graph in enumerate(_with_bodies(model.graph)):
        main = number == 0
        for sparse in graph.sparse_initializer:
            graph.initializer.append(densely(sparse, sparse.values.name))
        del graph.sparse_initializer[:]
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in STANDARD:
                for attribute in node.attribute:
                    if attribute.name == "sparse_value":
                        value = densely(attribute.sparse_tensor, node.output[0])
                        attribute.CopyFrom(helper.make_attribute("value", value))
    return found


def store_sparsely(model: onnx.ModelProto, constants: Mapping[str, onnx.SparseTensorProto]) -> None:
    """Turn constants of the main graph that are what they were into sparse ones again, in place."""
    graph = model.graph
    for index in reversed(range(len(graph.initializer))):
        name = graph.initializer[index].name
        if name in constants and holds(constants[name], numpy_helper.to_array(graph.initializer[index])):
            del graph.initializer[index]
            graph.sparse_initializer.append(constants[name])
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in constants:
            sparse = helper.make_attribute("sparse_value", constants[node.output[0]])
            node.attribute[0].CopyFrom(sparse)


def holds(constant: onnx.SparseTensorProto, array: np.ndarray[Any, Any]) -> bool:
    """Tell whether a sparse constant stands for an array."""
    return np.array_equal(numpy_helper.to_array(dense(constant, "")), array)


def sparse_bytes(constant: onnx.SparseTensorProto) -> int:
    """Count what the numbers of a sparse constant and their places take."""
    return sum(numpy_helper.to_array(part).nbytes for part in (constant.values, constant.indices))


def dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Return a sparse tensor as a dense one of some name.

    Follows the specification of `SparseTensorProto`: places are counted through the whole tensor, or given
    along each axis.
    """
    values = numpy_helper.to_array(sparse.values)
    places = numpy_helper.to_array(sparse.indices)
    if places.ndim == 2:
        places = np.ravel_multi_index(tuple(places.T), tuple(sparse.dims)) if len(places) else places[:, 0]
    whole = np.zeros(math.prod(sparse.dims), values.dtype)
    whole[places] = values
    return numpy_helper.from_array(whole.reshape(tuple(sparse.dims)), name)


def _with_bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and the bodies of its control flow."""
    yield graph
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from _with_bodies(body)
