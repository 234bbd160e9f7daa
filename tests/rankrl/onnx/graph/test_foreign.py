"""Operators of other domains than ONNX's own, and functions that a file brings along."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from call_options import grouped
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, generator, images, model_of, network_of, of_low_rank

import rankrl
from decomposition import DecompositionError
from rankrl.errors import ExportError
from rankrl.onnx.export.graph_passes import pad_channels
from rankrl.onnx.export.int8 import integer_nodes
from rankrl.onnx.graph import OnnxGraphError, PreparedFile, find_sites, network_costs
from rankrl.onnx.graph.sites import foreign_reason

X = {"x": images(20)}
LITTLE: dict[str, Any] = {
    "decomposition": "tucker",
    "candidates": 6,
    "iterations": 5,
    "final_iterations": 10,
    "timing": rankrl.LatencyOptions(batch=2, runs=2),
}
BLOCK = ["a", "w"], ["o"], [helper.make_node("Conv", ["a", "w"], ["c"], "conv", pads=[1] * 4)]


def convolved(domain: str = "", functions: Sequence[onnx.FunctionProto] = ()) -> onnx.ModelProto:
    """Two convolutions of some domain with activations behind them, then a product."""
    random = generator()
    constants = {
        "first": (random.standard_normal((16, 3, 3, 3)) / 5).astype(np.float32),
        "second": of_low_rank(32, 16 * 9, 6).reshape(32, 16, 3, 3),
        "last": of_low_rank(32, 5, 3),
    }
    pads = {} if functions else {"pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], "first", domain=domain, **pads),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "second"], ["c"], "second", domain=domain, **pads),
        helper.make_node("Relu", ["c"], ["d"], "relu2"),
        helper.make_node("ReduceMean", ["d"], ["e"], "pool", axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["e", "last"], ["y"], "last"),
    ]
    shapes: tuple[Any, Any] = {"x": ["n", 3, 10, 9]}, {"y": ["n", 5]}
    return model_of(nodes, constants, *shapes, domains=[domain] if domain else [], functions=functions)


def optimised(model: onnx.ModelProto, folder: Path, level: str) -> Path:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return folder / f"{level}.onnx"


def answers(path: Path) -> Array:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: Array = session.run(None, X)[0]
    return found


@pytest.mark.parametrize("level", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_what_onnxruntime_optimised_is_listed_with_the_remedy(level: str, tmp_path: Path) -> None:
    path = optimised(convolved(), tmp_path, level)
    kinds = {node.name: (node.domain, node.op_type) for node in onnx.load(path).graph.node}
    given = PreparedFile.read(path, X)
    foreign = [site for site in given.sites if kinds[site.name][0] not in ("", "ai.onnx")]
    assert len(foreign) == 2, kinds
    for site in foreign:
        assert re.search(r"onnxruntime's own .*before onnxruntime optimised it", site.spec.refusal or "")
        assert site.spec.params >= 16 * 3 * 9
        assert site.spec.macs >= 90 * 16 * 3 * 9
    assert [site.name for site in given.usable] == ["last"]
    with pytest.raises(DecompositionError, match=r"cannot be reached.*2 nodes.*before onnxruntime optimised"):
        rankrl.compress(path, X, tmp_path / "small.onnx", params=0.5)


def test_a_file_whose_weights_are_all_foreign_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = convolved()
    del model.graph.node[-2:], model.graph.initializer[-1:]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("d", TensorProto.FLOAT, ["n", 32, 10, 9]))
    path = optimised(model, tmp_path, "ORT_ENABLE_EXTENDED")
    with pytest.raises(OnnxGraphError, match=r"no node that can be compressed.*before onnxruntime optimised"):
        rankrl.compress(path, X, tmp_path / "small.onnx", params=0.5)


def test_a_foreign_product_and_one_in_a_domain_of_nobodys(tmp_path: Path) -> None:
    fused = helper.make_node("FusedMatMul", ["x", "w"], ["y"], "product", domain="com.microsoft", alpha=2.0)
    ends: tuple[Any, Any] = {"x": ["n", 16]}, {"y": ["n", 16]}
    model = model_of([fused], {"w": of_low_rank(16, 16, 3)}, *ends, domains=["com.microsoft"])
    network = network_of(model, tmp_path)
    (site,) = find_sites(network, {"x": np.ones((2, 16), np.float32)})
    assert (site.spec.params, site.spec.macs) == (256, 256)
    assert "FusedMatMul" in str(site.spec.refusal)
    assert network_costs(network, [site])["params"] == 256
    node = network.graph_model().graph[0]
    node.domain = "nobody.knows"
    assert "of the domain 'nobody.knows'; export" in foreign_reason(node)


def test_functions_of_the_file_are_nodes_like_others(tmp_path: Path) -> None:
    """Even one that is called Conv, and turns the sign of what ONNX's own computes."""
    inputs, outputs, nodes = BLOCK
    nodes = [*nodes, helper.make_node("Neg", ["c"], ["o"], "turn")]
    function = helper.make_function("mine", "Conv", inputs, outputs, nodes, [helper.make_opsetid("", 13)])
    model = convolved("mine", [function])
    plain, path = convolved(), tmp_path / "net.onnx"
    for weight in plain.graph.initializer[:2]:
        weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    onnx.save(plain, tmp_path / "plain.onnx")
    onnx.save(model, path)
    np.testing.assert_allclose(answers(path), answers(tmp_path / "plain.onnx"), atol=1e-6)
    result = rankrl.compress(path, X, tmp_path / "small.onnx", params=0.6, **grouped(**LITTLE))
    assert len(result.layers) == 3
    assert any(layer.operations for layer in result.plan)
    small = onnx.load(tmp_path / "small.onnx")
    assert not small.functions
    before, after = answers(path), answers(tmp_path / "small.onnx")
    assert np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)


def test_writing_leaves_foreign_convolutions_alone() -> None:
    own, foreign = convolved(), convolved("com.microsoft.nchwc")
    assert pad_channels(ir.from_proto(own), 24) == 1
    assert pad_channels(ir.from_proto(foreign), 24) == 0
    assert integer_nodes(ir.from_proto(own).graph, {"second"})
    with pytest.raises(ExportError, match="belongs to no convolution"):
        integer_nodes(ir.from_proto(foreign).graph, {"second"})
