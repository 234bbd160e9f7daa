"""Sparse constants are read as the tensors that they stand for, as onnxruntime reads them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import layer_options
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper

import rankrl
from rankrl.errors import ExportError
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.protobuf import dense, store_densely
from rankrl.options.decomposition import FILE_FORMATS

DRAWN = np.random.default_rng(0)
X = DRAWN.standard_normal((48, 6, 5, 5)).astype(np.float32)


def sparse(name: str, values: np.ndarray, *, along_axes: bool = False) -> onnx.SparseTensorProto:
    places = np.argwhere(values) if along_axes else np.flatnonzero(values)
    return helper.make_sparse_tensor(
        numpy_helper.from_array(values[values != 0], name),
        numpy_helper.from_array(places.astype(np.int64), f"{name}_places"),
        list(values.shape),
    )


def thinned(outputs: int, inputs: int) -> np.ndarray:
    """Draw a matrix of a low rank of which half the rows are zero."""
    product = DRAWN.standard_normal((outputs, 3)) @ DRAWN.standard_normal((3, inputs)) / 4
    product[::2] = 0
    return np.asarray(product, dtype=np.float32)


@given(
    values=arrays.arrays(
        st.sampled_from([np.float32, np.int64, np.uint8]),
        arrays.array_shapes(max_dims=4, max_side=4),
        elements=st.sampled_from([0, 0, 1, 3]),
    ),
    along_axes=st.booleans(),
)
def test_a_sparse_tensor_is_the_dense_one_that_it_was_made_of(values: np.ndarray, along_axes: bool) -> None:
    found = dense(sparse("", values, along_axes=along_axes), "values")
    assert found.name == "values"
    np.testing.assert_array_equal(numpy_helper.to_array(found), values)


def test_weights_that_a_file_stores_sparsely_are_compressed(tmp_path: Path) -> None:
    weights = {"W": thinned(12, 54).reshape(12, 6, 3, 3), "V": thinned(10, 12).T.copy()}
    nodes = [
        helper.make_node("Conv", ["x", "W"], ["a"], "conv"),
        helper.make_node("GlobalAveragePool", ["a"], ["b"], "pool"),
        helper.make_node("Flatten", ["b"], ["c"], "flatten"),
        helper.make_node("MatMul", ["c", "V"], ["d"], "product"),
        helper.make_node("Constant", [], ["bias"], sparse_value=sparse("", np.arange(10, dtype=np.float32))),
        helper.make_node("Add", ["d", "bias"], ["y"], "add"),
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6, 5, 5]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10]),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:])
    graph.sparse_initializer.extend(sparse(*each) for each in weights.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "sparse.onnx"
    onnx.save(model, path)
    network = OnnxNetwork.load(path)
    assert set(network.model.graph.initializers) == set(weights)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    np.testing.assert_allclose(network.session().run({"x": X})[0], expected, rtol=1e-5, atol=1e-6)
    found = rankrl.compress(
        path, X, tmp_path / "small.onnx", params=0.6, decomposition=layer_options(FILE_FORMATS, candidates=5)
    )
    assert "conv" not in found.untouched
    assert "sparse" not in str(found.untouched)
    assert found.before["params"] == 12 * 54 + 120 + 10
    assert found.score > 0.9


def test_a_sparse_constant_without_numbers_is_zeros_and_one_too_large_is_refused() -> None:
    empty = sparse("none", np.zeros((2, 3), np.float32), along_axes=True)
    assert not numpy_helper.to_array(dense(empty, "none")).any()
    empty.dims[:] = [2**20, 2**12]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", [], [])
    graph.sparse_initializer.append(empty)
    with pytest.raises(ExportError, match=r"'none' of shape \(1048576, 4096\) takes 17,179,869,184 bytes"):
        store_densely(helper.make_model(graph))
