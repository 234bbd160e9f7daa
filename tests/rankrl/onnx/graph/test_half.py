"""Files in half precision become smaller files in half precision."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from call_options import grouped
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from small_graphs import FRAMES, MAPS, Array, convolutions, images, sentences, shared, tokens, upsampling

import rankrl
from decomposition import PlanError, Quantise
from rankrl.errors import ConfigError
from rankrl.onnx.graph import OnnxGraphError, PreparedFile
from rankrl.onnx.graph.precisions import HALF, half_values, in_float32, in_half
from rankrl.onnx.protobuf import to_proto

LITTLE: dict[str, Any] = {
    "decomposition": "tucker",
    "candidates": 4,
    "iterations": 5,
    "final_iterations": 10,
    "timing": rankrl.LatencyOptions(batch=2, runs=2),
}
NETWORKS = {
    "convolutions": (convolutions, {"x": images(40)}),
    "tokens": (tokens, sentences(40)),
    "upsampling": (upsampling, {"x": MAPS[:40]}),
    "shared": (lambda: shared(bias=True), {"frames": FRAMES[:40]}),
}


def halved(model: onnx.ModelProto, *, ends: bool = True, mixed: bool = False) -> onnx.ModelProto:
    """Convert a model as onnxruntime's own converter does."""
    blocked = ["Tanh", "Softmax", "BatchNormalization", "Relu"] if mixed else []
    found: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=not ends, op_block_list=blocked)
    return found


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its nodes in topological order, as that converter does not leave them."""
    graph = ir.from_proto(model)
    graph.graph.sort()
    found: onnx.ModelProto = ir.to_proto(graph)
    return found


def fed(path: Path, feed: dict[str, Array]) -> dict[str, Array]:
    kinds = {entry.name: entry.type for entry in onnxruntime.InferenceSession(path).get_inputs()}
    return {
        name: each.astype(np.float16) if kinds[name] == "tensor(float16)" else each
        for name, each in feed.items()
    }


def outputs(path: Path, feed: dict[str, Array]) -> list[Array]:
    return list(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed))


@pytest.mark.parametrize("kind", ["whole", "float32 at its ends", "mixed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_there_and_back_is_the_same_file(name: str, kind: str) -> None:
    made, feed = NETWORKS[name]
    model = in_order(halved(made(), ends=kind != "float32 at its ends", mixed=kind == "mixed"))
    half = half_values(ir.from_proto(model))
    assert half
    wide = to_proto(in_float32(ir.from_proto(model), half))
    onnx.checker.check_model(wide, full_check=True)
    kinds = {each.data_type for each in wide.graph.initializer}
    assert not kinds & set(HALF)
    taken = {each.name: each.type.tensor_type.elem_type for each in wide.graph.input}
    assert taken == {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    assert to_proto(in_half(ir.from_proto(wide), half, "it")) == to_proto(ir.from_proto(model))
    some = {key: value[:3] for key, value in feed.items()}
    narrow = [taken[key] == TensorProto.FLOAT16 for key in some]
    given = {
        key: value.astype(np.float16) if half else value
        for (key, value), half in zip(some.items(), narrow, strict=True)
    }
    sessions = [onnxruntime.InferenceSession(each.SerializeToString()) for each in (model, wide)]
    for before, after in zip(*(each.run(None, given) for each in sessions), strict=True):
        assert np.linalg.norm(before.astype(np.float32) - after) < 1e-2 * np.linalg.norm(after)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("convolutions", "whole"),
        ("tokens", "mixed"),
        ("upsampling", "whole"),
        ("shared", "float32 at its ends"),
    ],
)
def test_a_file_in_half_precision_is_handed_back_in_it(name: str, kind: str, tmp_path: Path) -> None:
    made, feed = NETWORKS[name]
    path, small = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(halved(made(), ends=kind != "float32 at its ends", mixed=kind == "mixed"), path)
    taken = fed(path, feed)
    result = rankrl.compress(path, taken, small, params=0.75, **grouped(**LITTLE))
    before, after = onnx.load(path), onnx.load(small)
    onnx.checker.check_model(after, full_check=True)
    assert [each.type for each in after.graph.input] == [each.type for each in before.graph.input]
    assert [each.type for each in after.graph.output] == [each.type for each in before.graph.output]
    for each in after.graph.initializer:
        if "/" in each.name:  # a stage of a factorised node
            assert each.data_type in (TensorProto.FLOAT16, TensorProto.INT64), each.name
    stored = sum(
        int(np.prod(each.dims)) * {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2}.get(each.data_type, 0)
        for each in after.graph.initializer
    )
    assert result.after["bytes"] == stored < result.before["bytes"]
    assert result.after["params"] <= 0.75 * result.before["params"]
    assert result.collapsed is None
    some = {key: value[:6] for key, value in taken.items()}
    for found, expected in zip(outputs(small, some), outputs(path, some), strict=True):
        assert found.dtype == expected.dtype
        assert np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected.astype(np.float32))


def test_integers_do_not_go_with_half_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, small = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(halved(convolutions()), path)
    feed = fed(path, {"x": images(20)})
    with pytest.raises(ConfigError, match="which integers do not go with; export it in float32"):
        rankrl.compress(path, feed, small, bytes=0.5, **grouped(precisions=("int8_weights",), **LITTLE))
    both = ("float32", "int8_weights")
    result = rankrl.compress(path, feed, small, bytes=0.8, **grouped(precisions=both, **LITTLE))
    assert "precisions=float32 alone is taken" in caplog.text
    assert all(layer.operation(Quantise) is None for layer in result.plan)
    assert result.after["bytes"] <= 0.8 * result.before["bytes"]
    plain = tmp_path / "plain.onnx"
    onnx.save(convolutions(), plain)
    plan = rankrl.compress(
        plain, {"x": images(20)}, small, bytes=0.4, **grouped(precisions=("int8_weights",), **LITTLE)
    ).plan
    with pytest.raises(PlanError, match=r"rounds '\w+' of .* to integers; a file in half"):
        rankrl.apply_plan(path, plan, feed, small)


def test_what_half_precision_cannot_hold_is_refused_by_name() -> None:
    model = ir.from_proto(halved(convolutions()))
    half = half_values(model)
    wide = in_float32(model, half)
    name, value = next(iter(wide.graph.initializers.items()))
    values = value.const_value.numpy().copy()
    values.flat[0] = 1e6
    value.const_value = ir.tensor(values, name=name)
    with pytest.raises(OnnxGraphError, match=rf"cannot hold 1e\+06 \('{name}'\).*convert_float_to_float16"):
        in_half(wide, half, "it")


def test_a_precision_that_onnxruntime_does_not_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = convolutions()
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(OnnxGraphError, match=r"bfloat16.*float32 or float16"):
        PreparedFile.read(tmp_path / "net.onnx", {"x": images(20)})
