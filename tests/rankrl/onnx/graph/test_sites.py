"""Which nodes can be compressed, and what is known of them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import layer_options
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from small_graphs import (
    FRAMES,
    OPSETS,
    Array,
    convolutions,
    generator,
    images,
    model_of,
    network_of,
    sentences,
    shared,
    tokens,
)
from torch import nn

import rankrl
from decomposition import collect_moments, inspect_layers
from decomposition.calibration.metric import whole
from rankrl.onnx.graph import Site, find_sites, network_costs
from rankrl.onnx.graph.calibration import Captured
from rankrl.onnx.graph.calibration import collect_moments as moments_of_nodes


def sites_of(model: Any, feed: dict[str, Array], folder: Path) -> dict[str, Site]:
    return {site.name: site for site in find_sites(network_of(model, folder), feed)}


def one_node(op_type: str, weight: Array, shape: list[Any], ranks: int, **attributes: Any) -> Any:
    node = helper.make_node(op_type, ["x", "w"], ["y"], "node", **attributes)
    return model_of([node], {"w": weight}, {"x": shape}, {"y": [None] * ranks})


@pytest.mark.parametrize("opset", OPSETS)
def test_convolutions_and_products_are_found_in_order(opset: int, tmp_path: Path) -> None:
    found = sites_of(convolutions(opset), {"x": images(2)}, tmp_path)
    assert [site.spec.kind for site in found.values()] == ["conv2d", "conv2d", "linear"]
    assert all(site.spec.refusal is None for site in found.values())
    assert [site.absorber for site in found.values()] == ["bias", "batch_norm", "bias"]
    assert found["second"].spec.output_sizes == ((11, 4),)
    assert found["first"].spec.macs == 11 * 4 * 16 * 27
    others = sites_of(tokens(opset), sentences(2), tmp_path)
    assert [(site.spec.kind, site.absorber) for site in others.values()] == [
        ("linear", "add"),
        ("conv1d", None),
    ]
    assert others["mix"].spec.macs == 7 * 24 * 24


@pytest.mark.parametrize("model", [convolutions(), tokens()])
def test_a_site_as_a_module_computes_what_its_node_does(model: Any, tmp_path: Path) -> None:
    network = network_of(model, tmp_path)
    feed: dict[str, Array] = {"x": images(3)} if len(network.inputs) == 1 else sentences(3)
    for site in find_sites(network, feed):
        captured = Captured(network.graph_model(), [site.input_name, site.output_name], "here")
        values = captured.run(feed)
        with torch.no_grad():
            found = site.module()(site.padded(values[site.input_name]))
        np.testing.assert_allclose(found, values[site.output_name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
@pytest.mark.parametrize(("size", "stride", "kernel"), [(9, 2, 4), (8, 3, 2), (7, 1, 6)])
def test_automatic_padding_is_that_of_the_specification(
    auto_pad: str, size: int, stride: int, kernel: int, tmp_path: Path
) -> None:
    weight = generator().standard_normal((2, 3, kernel)).astype(np.float32)
    model = one_node("Conv", weight, ["n", 3, "l"], 3, auto_pad=auto_pad, strides=[stride])
    x = generator().standard_normal((2, 3, size)).astype(np.float32)
    (site,) = sites_of(model, {"x": x}, tmp_path).values()
    with torch.no_grad():
        found = site.module()(site.padded(x))
    np.testing.assert_allclose(found, ReferenceEvaluator(model).run(None, {"x": x})[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            one_node("Conv", np.ones((4, 1, 3, 3), np.float32), ["n", 4, 8, 8], 4, group=4),
            r"grouped convolution \(group=4\)",
        ),
        (one_node("Conv", np.ones((2, 4, 1, 1, 1), np.float32), ["n", 4, 2, 2, 2], 5), r"along 3 axes"),
        (
            one_node("ConvTranspose", np.ones((4, 2, 3), np.float32), ["n", 4, 8], 3, group=2),
            r"grouped convolution \(group=2\)",
        ),
        (one_node("MatMul", np.ones((2, 4, 3), np.float32), [2, 4, 4], 3), r"has 3 axes"),
        (one_node("Gemm", np.ones((4, 3), np.float32), ["n", 4], 2, alpha=2.0), r"transA, alpha or beta"),
    ],
)
def test_what_cannot_be_compressed_has_a_reason(model: Any, reason: str, tmp_path: Path) -> None:
    sizes = [
        2 if axis.dim_param else axis.dim_value for axis in model.graph.input[0].type.tensor_type.shape.dim
    ]
    (site,) = sites_of(model, {"x": np.ones(sizes, np.float32)}, tmp_path).values()
    assert site.spec.refusal is not None

    assert re.search(reason, site.spec.refusal)


def test_a_shared_weight_is_one_site_and_a_turned_one_is_followed(tmp_path: Path) -> None:
    weight = generator().standard_normal((4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("MatMul", ["a", "w"], ["b"], "second"),
        helper.make_node("Transpose", ["v"], ["turned"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["b", "turned"], ["c"], "third"),
        helper.make_node("MatMul", ["c", "b"], ["y"], "attention"),
    ]
    model = model_of(nodes, {"w": weight, "v": weight + 1}, {"x": [4, 4]}, {"y": [4, 4]})
    found = sites_of(model, {"x": np.ones((4, 4), np.float32)}, tmp_path)
    assert list(found) == ["first", "second", "third"]  # a product of two activations has no weight
    assert found["first"].spec.refusal is None
    assert [node.name for node in found["first"].nodes] == ["first", "second"]
    assert found["first"].spec.macs == 2 * 16
    assert "shares its weight with 'first'" in (found["second"].spec.refusal or "")
    assert (found["second"].spec.params, found["second"].spec.macs) == (0, 0)
    np.testing.assert_array_equal(found["third"].weight, weight + 1)


def test_nodes_in_integers_stay(tmp_path: Path) -> None:
    constants = {
        "w": np.ones((4, 4), np.int8),
        "scale": np.array(0.5, np.float32),
        "plain": np.ones((4, 2), np.float32),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["weight"], "back"),
        helper.make_node("MatMul", ["x", "weight"], ["a"], "integers"),
        helper.make_node("MatMul", ["a", "plain"], ["y"], "floats"),
    ]
    model = model_of(nodes, constants, {"x": ["n", 4]}, {"y": ["n", 2]})
    network = network_of(model, tmp_path)
    integers, floats = find_sites(network, {"x": np.ones((2, 4), np.float32)})
    assert "its weight is in integers already" in (integers.spec.refusal or "")
    assert floats.spec.refusal is None
    costs = network_costs(network, [integers, floats])
    assert costs == {"params": 16 + 1 + 8, "macs": 16 + 8, "bytes": 16 + 4 + 32}


def test_a_double_weight_is_refused_by_its_type(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "node")
    types = {"x": TensorProto.DOUBLE, "y": TensorProto.DOUBLE}
    model = model_of([node], {"w": np.ones((4, 2))}, {"x": ["n", 4]}, {"y": ["n", 2]}, types=types)
    (site,) = sites_of(model, {"x": np.ones((2, 4))}, tmp_path).values()
    assert site.spec.refusal == "its weight is float64; only float32 is taken"


class Shared(nn.Module):
    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        values = {
            each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in model.graph.initializer
        }
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias="bias" in values)
        self.last = nn.Conv2d(16, 12, 1, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(values["weight"])
            self.last.weight.copy_(values["last"])
            if self.conv.bias is not None:
                self.conv.bias.copy_(values["bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.conv(x), self.conv(torch.tanh(x))
        y: torch.Tensor = self.last(a.mean((2, 3), keepdim=True) * b.mean((2, 3), keepdim=True))
        return y


def test_moments_are_those_of_a_layer_that_is_called_several_times(tmp_path: Path) -> None:
    model = shared(bias=True)
    network = network_of(model, tmp_path)
    sites = find_sites(network, {"frames": FRAMES})
    usable = [site for site in sites if site.spec.refusal is None]
    found = moments_of_nodes(network, usable, [{"frames": FRAMES}])["one"]
    module = Shared(model).eval()
    spec = next(s for s in inspect_layers(module, (8, 9, 9)) if s.name == "conv")
    assert (usable[0].spec.macs, usable[0].spec.params) == (spec.macs, spec.params)
    assert usable[0].spec.input_sizes == spec.input_sizes
    expected = collect_moments(module, [spec], torch.from_numpy(FRAMES))["conv"]
    assert found.count == expected.count
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-5)
    np.testing.assert_allclose(whole(found.covariance), whole(expected.covariance), atol=1e-4)


@pytest.mark.parametrize(
    ("precisions", "bias", "strides"),
    [
        (("float32",), True, (1, 1)),
        (("float32",), False, (1, 1)),
        (("float32",), True, (1, 2)),
        (("int8",), True, (1, 2)),
        (("int8_weights",), False, (1, 1)),
        pytest.param(("int8",), True, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8",), False, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8_weights",), True, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8_weights",), True, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_nodes_are_rewritten_together(
    tmp_path: Path, bias: bool, strides: tuple[int, int], precisions: tuple[str, ...]
) -> None:
    model = shared(bias=bias, strides=strides)
    onnx.save(model, tmp_path / "net.onnx")
    result = rankrl.compress(
        tmp_path / "net.onnx",
        {"frames": FRAMES},
        tmp_path / "small.onnx",
        bytes=0.6,
        timing=rankrl.LatencyOptions(batch=4, runs=2),
        decomposition=layer_options(iterations=5, final_iterations=10, precisions=("float32", *precisions)),
    )
    assert result.plan["one"].operations
    assert "shares its weight" in result.untouched["two"]
    assert result.after["bytes"] <= 0.6 * result.before["bytes"]
    (output,) = result.outputs
    assert output.error < 0.25
    small = onnx.load(tmp_path / "small.onnx")
    products = [node for node in small.graph.node if node.op_type == "Conv"]
    mine = [[node for node in products if node.name.startswith(name)] for name in ("one", "two")]
    assert [len(each) for each in mine] == [len(mine[0])] * 2
    assert "weight" not in {tensor.name for tensor in small.graph.initializer}
    if precisions == ("float32",):
        for node, twin in zip(*mine, strict=True):
            assert node.input[1:] == twin.input[1:]  # the weights are stored once
        stored = sum(int(np.prod(tensor.dims)) for tensor in small.graph.initializer)
        assert stored == result.after["params"]
    onnxruntime.InferenceSession(tmp_path / "small.onnx").run(None, {"frames": FRAMES[:3]})


def test_nodes_that_use_a_weight_in_different_ways_stay(tmp_path: Path) -> None:
    network = network_of(shared(bias=True, other_bias=True), tmp_path)
    sites = {site.name: site for site in find_sites(network, {"frames": FRAMES})}
    for name in ("one", "two"):
        assert "in another way" in (sites[name].spec.refusal or "")
    assert sites["last_conv"].spec.refusal is None
