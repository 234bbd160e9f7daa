"""Budgets and reports count the bytes that the file stores, whatever its constants are stored as."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import layer_options
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, convolutions, drawn, of_low_rank

import rankrl
from decomposition import Factorise, Quantise
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.precisions import half_values

X = drawn(80, 3, 10, 9)
CALL: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=2, runs=2, int8=False), "progress": False}
WEIGHTS = ("first", "first_bias", "second", "last", "last_bias")
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def cast(kind: int, names: Collection[str] = WEIGHTS) -> onnx.ModelProto:
    """Constants in another type, from which the file casts them."""
    model = convolutions(18)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            name, array = tensor.name, numpy_helper.to_array(tensor)
            stored = array.astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(stored, f"{name}_stored"))
            node = helper.make_node("Cast", [tensor.name], [name], f"cast_{name}", to=TensorProto.FLOAT)
            model.graph.node.insert(0, node)
    return model


def sparse() -> onnx.ModelProto:
    """A weight most numbers of which are zero, stored without them."""
    model = convolutions(18)
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name == "second"]
    array = numpy_helper.to_array(weight).copy()
    array[np.abs(array) < np.quantile(np.abs(array), 0.9)] = 0
    model.graph.initializer.remove(weight)
    values = numpy_helper.from_array(array[array != 0], "second")
    places = numpy_helper.from_array(np.flatnonzero(array), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, list(array.shape)))
    return model


def shared_bias() -> onnx.ModelProto:
    """Two convolutions with one bias."""
    model = convolutions(18)
    again = numpy_helper.from_array(of_low_rank(16, 16 * 9, 4).reshape(16, 16, 3, 3), "again")
    model.graph.initializer.append(again)
    node = helper.make_node("Conv", ["b", "again", "first_bias"], ["bb"], "again", pads=[1] * 4)
    model.graph.node.insert(2, node)
    model.graph.node[3].input[0] = "bb"
    return model


def half_at_its_ends() -> onnx.ModelProto:
    """Inputs and outputs in half precision, and nothing between."""
    model = convolutions(18)
    graph = model.graph
    graph.node[0].input[0], graph.node[-1].output[0] = "wide", "wide_y"
    graph.node.insert(0, helper.make_node("Cast", ["x"], ["wide"], "widen", to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Cast", ["wide_y"], ["y"], "narrow", to=TensorProto.FLOAT16))
    for value in (graph.input[0], graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def partly_half() -> onnx.ModelProto:
    """The first convolution computes in half precision; the others store a weight in it."""
    model = cast(TensorProto.FLOAT16, ("second", "last"))
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.name in ("first", "first_bias"):
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    (first,) = [node for node in graph.node if node.name == "first"]
    place = list(graph.node).index(first)
    first.input[0], first.output[0] = "narrow_x", "narrow_a"
    graph.node.insert(place, helper.make_node("Cast", ["x"], ["narrow_x"], "in", to=TensorProto.FLOAT16))
    graph.node.insert(place + 2, helper.make_node("Cast", ["narrow_a"], ["a"], "out", to=TensorProto.FLOAT))
    return model


MADE = {
    "float16": lambda: cast(TensorProto.FLOAT16),
    "bfloat16": lambda: cast(TensorProto.BFLOAT16),
    "float64": lambda: cast(TensorProto.DOUBLE),
    "one bias in float16": lambda: cast(TensorProto.FLOAT16, ["first_bias"]),
    "one weight in float16": lambda: cast(TensorProto.FLOAT16, ["second"]),
    "sparse": sparse,
    "shared bias": shared_bias,
    "float16 at its ends": half_at_its_ends,
    "partly float16": partly_half,
}


def held(path: Path) -> int:
    """Count the bytes of a file's floats, and of the places of sparse ones, as protobuf holds them."""
    graph = onnx.load(path).graph
    dense = [numpy_helper.to_array(each) for each in graph.initializer if each.data_type in FLOATS]
    parts = [part for each in graph.sparse_initializer for part in (each.values, each.indices)]
    return sum(array.nbytes for array in (*dense, *map(numpy_helper.to_array, parts)))


def answers(path: Path, x: Array) -> Array:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    (found,) = session.run(None, {"x": x.astype(np.float16) if "float16" in entry.type else x})
    return np.asarray(found, np.float32)


def compressed(
    name: str, folder: Path, precisions: tuple[str, ...], skip: tuple[str, ...] = (), **budget: float
) -> Any:
    path = folder / "net.onnx"
    model = MADE[name]()
    onnx.checker.check_model(model)
    onnx.save(model, path)
    little: dict[str, Any] = {"candidates": 4, "iterations": 5, "final_iterations": 10, "skip": skip}
    options = layer_options(("tucker", "pifa"), precisions=precisions, **little)
    x = X.astype(np.float16) if model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16 else X
    return rankrl.compress(path, {"x": x}, folder / "small.onnx", decomposition=options, **budget, **CALL)


@pytest.mark.parametrize("name", MADE)
def test_a_budget_in_bytes_is_kept_as_the_file_stores_them(name: str, tmp_path: Path) -> None:
    result = compressed(name, tmp_path, ("float32",), bytes=0.7)
    assert result.before["bytes"] == held(tmp_path / "net.onnx")
    assert result.after["bytes"] == held(result.path) <= 0.7 * result.before["bytes"]
    before, after = (answers(path, X[:20]) for path in (tmp_path / "net.onnx", result.path))
    assert np.linalg.norm(after - before) < 0.3 * np.linalg.norm(before)
    if name != "float64":  # which is half as large in float32
        assert result.plan.chosen(Factorise)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_factors_are_stored_like_the_weight_in_whose_place_they_are(kind: int, tmp_path: Path) -> None:
    name = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}[kind]
    result = compressed(name, tmp_path, ("float32",), params=0.6)
    graph = onnx.load(result.path).graph
    new = [each for each in graph.initializer if "/" in each.name or ".shifted" in each.name]
    assert new
    norm = {"gamma", "beta", "mean", "variance", "second.shifted"}
    assert {each.data_type for each in graph.initializer if each.name not in norm} == {kind}


def test_constants_in_half_precision_compute_in_float32(tmp_path: Path) -> None:
    for name, computes in (("float16", False), ("float16 at its ends", False), ("partly float16", True)):
        onnx.save(MADE[name](), tmp_path / "net.onnx")
        assert half_values(OnnxNetwork.load(tmp_path / "net.onnx").model).computes is computes, name


@pytest.mark.parametrize("name", ["float16", "one bias in float16", "float16 at its ends"])
def test_a_file_that_computes_in_float32_may_compute_in_integers(name: str, tmp_path: Path) -> None:
    result = compressed(name, tmp_path, ("int8",), bytes=0.95)
    assert result.plan.chosen(Quantise)
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(result.path).graph.node)
    before, after = (answers(path, X[:20]) for path in (tmp_path / "net.onnx", result.path))
    assert np.linalg.norm(after - before) < 0.3 * np.linalg.norm(before)


def test_a_sparse_weight_that_stays_is_stored_sparsely(tmp_path: Path) -> None:
    result = compressed("sparse", tmp_path, ("float32",), ("second",), params=0.98)
    assert result.plan.chosen(Factorise)
    before, after = (
        onnx.load(path).graph.sparse_initializer for path in (tmp_path / "net.onnx", result.path)
    )
    assert list(before) == list(after)
