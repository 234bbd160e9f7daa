"""What is done to exported graphs, where values are read by outputs and by bodies of control flow too."""

import numpy as np
import onnx
import onnxruntime
import pytest
from edited import edited
from onnx import TensorProto, helper, numpy_helper

from rankrl.data import Preprocessing
from rankrl.onnx.export.graph_passes import (
    convolve_subsampling,
    fold_batchnorm_into_computed_weights,
    take_bytes,
)

X = np.random.default_rng(0).standard_normal((3, 4, 6, 6)).astype(np.float32)
SIZES = ["n", "c", "h", "w"]


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": X, "yes": np.array(True)})
    return found


def model_of(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], reader: str) -> onnx.ModelProto:
    """Return a graph from x to y whose value `a` an output or the body of an If reads besides."""
    entries = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 6, 6]),
        helper.make_tensor_value_info("yes", TensorProto.BOOL, []),
    ]
    outputs = ["y"]
    if reader == "output":
        outputs.append("a")
    if reader == "body":
        ends = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, SIZES)]
        body = helper.make_graph([helper.make_node("Neg", ["a"], ["inner"], "minus")], "body", [], ends)
        nodes = [*nodes, helper.make_node("If", ["yes"], ["z"], "if", then_branch=body, else_branch=body)]
        outputs.append("z")
    graph = helper.make_graph(
        nodes,
        "graph",
        entries,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SIZES) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("reader", ["", "output", "body"])
def test_a_batch_norm_is_folded_where_nothing_else_reads_the_convolution(reader: str) -> None:
    random = np.random.default_rng(1)
    constants = {
        "core": random.standard_normal((5, 4, 3, 3)).astype(np.float32),
        "y_scale": np.array(2, np.float32),  # a name that a constant of ours would have
    }
    parts = ["gamma", "beta", "mean", "variance"]
    constants |= {name: random.uniform(0.5, 1.5, 5).astype(np.float32) for name in parts}
    nodes = [
        helper.make_node("Mul", ["core", "y_scale"], ["weight"], "weight"),
        helper.make_node("Conv", ["x", "weight"], ["a"], "conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["a", *parts], ["y"], "norm"),
    ]
    model = model_of(nodes, constants, reader)
    expected = run(model)
    edited(model, fold_batchnorm_into_computed_weights)
    kinds = [node.op_type for node in model.graph.node]
    assert ("BatchNormalization" in kinds) == bool(reader)
    for found, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reader", ["", "output", "body"])
def test_slices_become_a_convolution_as_far_as_nothing_else_reads_between_them(reader: str) -> None:
    whole = np.iinfo(np.int64).max
    constants = {
        name: np.array([value], np.int64)
        for name, value in {"start": 0, "end": whole, "rows": 2, "columns": 3, "step": 2}.items()
    }
    nodes = [
        helper.make_node("Slice", ["x", "start", "end", "rows", "step"], ["a"], "rows"),
        helper.make_node("Slice", ["a", "start", "end", "columns", "step"], ["y"], "columns"),
    ]
    model = model_of(nodes, constants, reader)
    expected = run(model)
    assert edited(model, convolve_subsampling) == 1
    assert [node.op_type for node in model.graph.node].count("Slice") == bool(reader)
    for found, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_images_are_taken_under_names_that_are_free() -> None:
    constants = {"x_scale": np.array(2, np.float32), "x_float": np.array(3, np.float32)}
    nodes = [
        helper.make_node("Mul", ["x", "x_scale"], ["a"], "mul"),
        helper.make_node("Add", ["a", "x_float"], ["y"], "add"),
    ]
    model = model_of(nodes, constants, "")
    images = np.random.default_rng(0).integers(256, size=(2, 6, 6, 4), dtype=np.uint8)
    preprocessing = Preprocessing(4, 6, 6, mean=(0.5,) * 4, std=(0.25,) * 4)
    edited(model, lambda each: take_bytes(each.graph, preprocessing))
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x": images, "yes": np.array(True)})
    planes = (images.transpose(0, 3, 1, 2) / np.float32(255) - 0.5) / 0.25
    np.testing.assert_allclose(found, 2 * planes + 3, rtol=1e-5, atol=1e-5)
