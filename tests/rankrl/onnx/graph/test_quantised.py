"""Files that onnxruntime quantised, wholly or in part: what is in integers stays, the rest is compressed."""

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import grouped, layer_options
from onnx import TensorProto, helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from small_graphs import Array, convolutions, images, model_of, network_of, of_low_rank

import rankrl
from decomposition import Quantise
from rankrl.errors import ExportError
from rankrl.onnx.graph import OnnxNetwork, find_sites, network_costs, prepared_file
from rankrl.onnx.graph.sites import Site

X = np.random.default_rng(1).standard_normal((60, 6, 7, 7)).astype(np.float32)
PARAMS = {"c1": 24 * 54, "c2": 32 * 24 * 9, "fc": 12 * 32}
MACS = {"c1": 24 * 54 * 49, "c2": 32 * 24 * 9 * 49, "fc": 12 * 32}
BIASES = {"c1": 24, "c2": 32, "fc": 12}
QUANTISED = "it computes in integers already"
FINAL: dict[str, Any] = {"final_iterations": 10, "weigh_outputs": False}
LITTLE: dict[str, Any] = {**FINAL, "decomposition": "tucker", "iterations": 5}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Silence onnxruntime's own advice, which is logged by the root."""
    onnxruntime.set_default_logger_severity(3)
    with caplog.at_level(logging.ERROR, logger="root"):
        yield


def plain() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    constants = {
        "w1": of_low_rank(24, 54, 5).reshape(24, 6, 3, 3) * 4,
        "w2": of_low_rank(32, 24 * 9, 5).reshape(32, 24, 3, 3) * 4,
        "w3": of_low_rank(12, 32, 4) * 3,
    } | {
        f"b{number}": random.standard_normal(size).astype(np.float32) / 4
        for number, size in ((1, 24), (2, 32), (3, 12))
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a1"], "c1", pads=[1] * 4),
        helper.make_node("Relu", ["a1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["a2"], "c2", pads=[1] * 4),
        helper.make_node("Relu", ["a2"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "gap"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], "fc", transB=1),
    ]
    return model_of(nodes, constants, {"x": ["n", 6, 7, 7]}, {"y": ["n", 12]}, opset=17)


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        self.feeds = iter([{"x": X[:16]}])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


def operators(path: Path, target: Path, kept: list[str]) -> None:
    quantize_static(path, target, Reader(), quant_format=QuantFormat.QOperator, nodes_to_exclude=kept)


def pairs(path: Path, target: Path, kept: list[str], **options: Any) -> None:
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8} | options
    quantize_static(path, target, Reader(), per_channel=True, nodes_to_exclude=kept, **types)


def unsigned(path: Path, target: Path, kept: list[str]) -> None:
    pairs(path, target, kept, weight_type=QuantType.QUInt8)


def of_four_bits(path: Path, target: Path, kept: list[str]) -> None:
    pairs(path, target, kept, weight_type=QuantType.QInt4)


def rounded_floats(path: Path, target: Path, kept: list[str]) -> None:
    pairs(path, target, kept, extra_options={"AddQDQPairToWeight": True})


def dynamic(path: Path, target: Path, kept: list[str]) -> None:
    products = [f"{name}_MatMul" for name in kept]  # what it makes of a Gemm first, with an Add behind it
    quantize_dynamic(path, target, nodes_to_exclude=[*kept, *products])


Way = Callable[[Path, Path, list[str]], None]
WAYS: list[Way] = [operators, pairs, unsigned, of_four_bits, rounded_floats, dynamic]


def quantised(way: Way, kept: list[str], folder: Path) -> Path:
    path, target = folder / "plain.onnx", folder / "quantised.onnx"
    onnx.save(plain(), path)
    way(path, target, kept)
    return target


def sites_of(path: Path) -> dict[str, Site]:
    """Return the sites by the names that nodes had before."""
    found = find_sites(OnnxNetwork.load(path), {"x": X[:4]})
    return {site.name.split("_")[0]: site for site in found}


def run(path: Path) -> np.ndarray:
    found: np.ndarray = onnxruntime.InferenceSession(path).run(None, {"x": X})[0]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", ["c1", "c2", "fc"])
def test_what_is_in_integers_is_known_with_its_size_and_the_rest_is_in_floats(
    way: Way, kept: str, tmp_path: Path
) -> None:
    found = sites_of(quantised(way, [kept], tmp_path))
    assert list(found) == ["c1", "c2", "fc"]
    for name, site in found.items():
        # what an input only passes through makes no integers of the node
        assert site.spec.refusal == (None if name == kept else QUANTISED)
        assert site.spec.params == PARAMS[name] + (0 if site.bias is None else BIASES[name])
        assert site.spec.macs == MACS[name]


@pytest.mark.parametrize(
    ("way", "kept"), [(operators, "c2"), (pairs, "c1"), (pairs, "c2"), (of_four_bits, "c2"), (dynamic, "c2")]
)
def test_the_rest_of_a_quantised_file_is_compressed_in_floats_and_integers(
    way: Way, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, target = quantised(way, [kept], tmp_path), tmp_path / "small.onnx"
    before = run(path)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rankrl"):
        result = rankrl.compress(
            path, X, target, bytes=0.9, **grouped(precisions=["int8"], candidates=5, **LITTLE)
        )
    assert not [each for each in caplog.records if "integers" in each.getMessage()]
    assert set(result.untouched.values()) == {QUANTISED}
    assert [layer.name for layer in result.plan if layer.operations] == [kept]
    assert np.linalg.norm(run(target) - before) < 0.05 * np.linalg.norm(before)
    # names that it would give are taken
    again = rankrl.apply_plan(path, result.plan, X, tmp_path / "again.onnx", **grouped(**FINAL))
    assert again.path.read_bytes() == target.read_bytes()


def test_costs_count_weights_and_biases_in_integers_but_no_zero_points(tmp_path: Path) -> None:
    path = quantised(pairs, ["c2"], tmp_path)
    network = OnnxNetwork.load(path)
    sites = find_sites(network, {"x": X[:4]})
    found = network_costs(network, sites)
    floats = [each for each in network.model.graph.initializers.tensors() if each.dtype == TensorProto.FLOAT]
    scales = sum(each.size for each in floats) - PARAMS["c2"] - BIASES["c2"]
    assert found["params"] == sum(PARAMS.values()) + sum(BIASES.values()) + scales
    integers = PARAMS["c1"] + PARAMS["fc"] + 4 * (BIASES["c1"] + BIASES["fc"])
    assert found["bytes"] == integers + 4 * (PARAMS["c2"] + BIASES["c2"] + scales)
    assert found["macs"] == sum(MACS.values())
    fewer = network_costs(*_network(quantised(of_four_bits, ["c2"], tmp_path)))
    assert found["bytes"] - fewer["bytes"] == (PARAMS["c1"] + PARAMS["fc"]) // 2


def _network(path: Path) -> tuple[OnnxNetwork, list[Site]]:
    network = OnnxNetwork.load(path)
    return network, find_sites(network, {"x": X[:4]})


def test_a_weight_of_packed_four_bits_has_the_size_that_its_node_says(tmp_path: Path) -> None:
    node = helper.make_node(
        "MatMulNBits",
        ["x", "packed", "scales"],
        ["a"],
        "n",
        "",
        "com.microsoft",
        K=64,
        N=10,
        bits=4,
        block_size=32,
    )
    constants = {
        "packed": np.random.default_rng(0).integers(256, size=(10, 2, 16), dtype=np.uint8),
        "scales": np.ones((10, 2), np.float32),
        "plain": of_low_rank(10, 8, 2),
    }
    nodes = [node, helper.make_node("MatMul", ["a", "plain"], ["y"], "plain")]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "packed",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
            [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    network = network_of(model, tmp_path)
    packed, floats = find_sites(network, {"x": np.ones((3, 64), np.float32)})
    assert (packed.spec.params, packed.spec.macs, packed.spec.refusal) == (640, 640, QUANTISED)
    assert floats.spec.refusal is None
    costs = network_costs(network, [packed, floats])
    assert costs == {"params": 640 + 20 + 80, "macs": 720, "bytes": 320 + 80 + 320}


def test_a_product_of_two_inputs_in_integers_holds_no_weight(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["left", "s", "z"], "round"),
        helper.make_node("Transpose", ["left"], ["right"], "turn", perm=[1, 0]),
        helper.make_node("MatMulInteger", ["left", "right", "z", "z"], ["y"], "product"),
    ]
    model = model_of(nodes, {}, {"x": [4, 5]}, {"y": [4, 4]}, types={"y": TensorProto.INT32})
    assert find_sites(network_of(model, tmp_path), {"x": np.ones((4, 5), np.float32)}) == []


def test_a_bias_in_integers_beside_a_weight_in_floats_is_known(tmp_path: Path) -> None:
    constants = {
        "w": of_low_rank(8, 12, 3),
        "whole": np.arange(8, dtype=np.int32),
        "scale": np.float32(0.5),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["whole", "scale"], ["bias"], "back"),
        helper.make_node("Gemm", ["x", "w", "bias"], ["y"], "product", transB=1),
    ]
    model = model_of(
        nodes, {name: np.asarray(each) for name, each in constants.items()}, {"x": ["n", 12]}, {"y": ["n", 8]}
    )
    (site,) = find_sites(network_of(model, tmp_path), {"x": np.ones((4, 12), np.float32)})
    assert site.spec.refusal is None
    assert site.bias is not None
    np.testing.assert_array_equal(site.bias, np.arange(8) / 2)
    found = rankrl.compress(
        tmp_path / "net.onnx",
        X.reshape(-1, 12)[:80],
        tmp_path / "small.onnx",
        params=0.8,
        **grouped(**LITTLE),
    )
    assert found.score > 0.9


def refusing(quantise: Callable[..., Path], together: list[set[str]]) -> Callable[..., Path]:
    """A quantiser that fails where all weights of one of some sets are asked for."""

    def quantised(path: Path, target: Path, *rest: Any, weights: Collection[str], **options: Any) -> Path:
        if any(each <= set(weights) for each in together):
            raise ExportError("cannot be loaded")
        return quantise(path, target, *rest, weights=weights, **options)

    return quantised


def opened(folder: Path) -> tuple[OnnxNetwork, list[Site], dict[str, Array]]:
    network, feed = network_of(convolutions(), folder), {"x": images(8)}
    sites = [site for site in find_sites(network, feed) if site.spec.refusal is None]
    return network, sites, feed


def test_all_can_where_nothing_fails(tmp_path: Path) -> None:
    assert prepared_file.without_integers(*opened(tmp_path)) == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_finds_the_one_that_fails(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, sites, feed = opened(tmp_path)
    monkeypatch.setattr(
        prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [{sites[failing].weight_name}])
    )
    with caplog.at_level(logging.WARNING):
        assert prepared_file.without_integers(network, sites, feed) == [sites[failing].name]
    assert f"cannot compute {sites[failing].name} in integers" in caplog.text


def test_leaves_out_one_of_two_that_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, sites, feed = opened(tmp_path)
    pair = {sites[0].weight_name, sites[2].weight_name}
    monkeypatch.setattr(prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [pair]))
    (left,) = prepared_file.without_integers(network, sites, feed)
    assert left in (sites[0].name, sites[2].name)


def test_a_search_over_precisions_leaves_it_in_floating_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sites, _ = opened(tmp_path)
    first = sites[0]
    monkeypatch.setattr(
        prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [{first.weight_name}])
    )
    found = rankrl.compress(
        tmp_path / "net.onnx",
        images(60),
        tmp_path / "small.onnx",
        bytes=0.3,
        decomposition=layer_options(
            precisions=["float32", "int8"], candidates=4, iterations=5, final_iterations=10
        ),
    )
    roundings = {layer.name: layer.operation(Quantise) for layer in found.plan}
    integer = {name: rounding is not None and rounding.integer for name, rounding in roundings.items()}
    assert not integer[first.name]
    assert any(integer.values())
    assert np.isfinite(found.score)
