"""Sparse constants of a file, turned into dense tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rankrl.onnx.errors import ExportError
from rankrl.onnx.operators import STANDARD

_MOST_BYTES = 2**31 - 1
"""What one protobuf message can hold, a whole network."""


def store_densely(model: onnx.ModelProto) -> None:
    """Turn sparse constants into dense ones, initializers and those of `Constant` nodes alike.

    onnx_ir knows no sparse constants, so this precedes the conversion of a model to it.

    Args:
        model: Changed in place. Names stay.

    Raises:
        ExportError: A dense constant is too large for one file with the rest of the model.
    """

    def densely(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
        itemsize = helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
        size = math.prod(sparse.dims) * itemsize
        if model.ByteSize() + size > _MOST_BYTES:
            raise ExportError(
                f"the sparse constant {name!r} of shape {tuple(sparse.dims)} takes {size:,} bytes when it is "
                "dense; networks of up to 2 GiB are read"
            )
        return dense(sparse, name)

    for graph in _with_bodies(model.graph):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(densely(sparse, sparse.values.name))
        del graph.sparse_initializer[:]
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in STANDARD:
                for attribute in node.attribute:
                    if attribute.name == "sparse_value":
                        value = densely(attribute.sparse_tensor, node.output[0])
                        attribute.CopyFrom(helper.make_attribute("value", value))


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
