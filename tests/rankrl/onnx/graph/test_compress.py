"""From file to file."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import grouped
from onnx import helper
from onnx.reference import ReferenceEvaluator
from small_graphs import OPSETS, Array, convolutions, images, model_of, sentences, tokens

import rankrl
from decomposition import CompressionPlan, DecompositionError, Factorise, Quantise
from rankrl import file_compression
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.networks import graph
from rankrl.onnx.export.onnx_file import INT4_OPSET
from rankrl.onnx.graph import OnnxGraphError
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.options.timing import LatencyOptions
from rankrl.result import Compression

LITTLE: dict[str, Any] = {
    "decomposition": "tucker",
    "candidates": 4,
    "iterations": 5,
    "final_iterations": 10,
    "timing": LatencyOptions(batch=2, runs=2),
}


def compressed(model: onnx.ModelProto, inputs: Any, folder: Path, **options: Any) -> Compression:
    onnx.save(model, folder / "net.onnx")
    return rankrl.compress(
        folder / "net.onnx", inputs, folder / "small.onnx", **grouped(**{**LITTLE, **options})
    )


def outputs(path: Path, feed: dict[str, Array]) -> list[Array]:
    return list(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed))


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("network", ["convolutions", "tokens"])
def test_what_is_of_low_rank_loses_next_to_nothing(network: str, opset: int, tmp_path: Path) -> None:
    model = convolutions(opset) if network == "convolutions" else tokens(opset)
    given: Any = {"x": images(100)} if network == "convolutions" else sentences(100)
    result = compressed(model, given, tmp_path, decomposition=FILE_FORMATS, params=0.75, seed=1)
    assert result.after["params"] <= 0.75 * result.before["params"]
    assert result.after["file_bytes"] < result.before["file_bytes"]
    assert result.verified < 1e-4
    assert result.collapsed is None
    feed = {name: value[:5] for name, value in given.items()}
    original = outputs(tmp_path / "net.onnx", feed)
    if opset > 13:  # the evaluator's own batch normalisation of opset 13 is that of training
        original = ReferenceEvaluator(model).run(None, feed)
    for found, expected in zip(outputs(result.path, feed), original, strict=True):
        assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    written = onnx.load(result.path)
    assert [entry.version for entry in written.opset_import] == [opset]
    assert any("/" in node.name for node in written.graph.node)
    counted = sum(
        int(np.prod(each.dims))
        for each in written.graph.initializer
        if each.data_type == onnx.TensorProto.FLOAT
    )
    assert counted == result.after["params"]


def test_the_result_takes_other_sizes_as_the_original_does(tmp_path: Path) -> None:
    given = sentences(100)
    result = compressed(tokens(), given, tmp_path, macs=0.8)
    feed = {name: value[:3, :4] for name, value in given.items()}
    assert [each.shape for each in outputs(result.path, feed)] == [(3, 16), (3, 4, 24)]


def test_inputs_may_be_batches_of_any_length(tmp_path: Path) -> None:
    whole = sentences(60)
    batches = [{name: value[:, :length] for name, value in whole.items()} for length in (4, 5, 6, 7)]
    result = compressed(tokens(), iter(batches), tmp_path, params=0.8, heldout=0.3)
    assert result.after["params"] <= 0.8 * result.before["params"]


def test_the_plan_names_nodes_and_can_be_read_again(tmp_path: Path) -> None:
    result = compressed(convolutions(), images(), tmp_path, params=0.7)
    read = CompressionPlan.from_json(result.plan.to_json())
    assert read == result.plan
    assert [layer.name for layer in read] == ["first", "second", "last"]
    assert any(layer.operation(Factorise) for layer in read)
    assert set(result.untouched) | {layer.name for layer in read if layer.operations} == {
        "first",
        "second",
        "last",
    }
    assert CompressionPlan.from_json(metadata(onnx.load(result.path))["plan"]) == read


def test_the_original_is_untouched_and_never_the_target(tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    before = (tmp_path / "net.onnx").read_bytes()
    with pytest.raises(ConfigError, match=r"is the original itself"):
        rankrl.compress(tmp_path / "net.onnx", images(), tmp_path / "net.onnx", params=0.5)
    compressed(convolutions(), images(), tmp_path, params=0.7)
    assert (tmp_path / "net.onnx").read_bytes() == before


def test_external_data_are_taken_in(tmp_path: Path) -> None:
    onnx.save(
        convolutions(), tmp_path / "net.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    result = rankrl.compress(
        tmp_path / "net.onnx", images(), tmp_path / "small.onnx", params=0.7, **grouped(**LITTLE)
    )
    (tmp_path / "w").unlink()
    assert outputs(result.path, {"x": images(2)})[0].shape == (2, 5)


@pytest.mark.parametrize("precision", ["int8", "int8_weights", "int4_weights"])
@pytest.mark.parametrize("network", ["convolutions", "tokens"])
def test_integers_are_written(precision: str, network: str, tmp_path: Path) -> None:
    model = convolutions() if network == "convolutions" else tokens()
    given: Any = {"x": images(100)} if network == "convolutions" else sentences(100)
    result = compressed(model, given, tmp_path, bytes=0.3, precisions=(precision,))
    assert result.after["bytes"] <= 0.3 * result.before["bytes"]
    rounded = [layer for layer in result.plan if layer.operation(Quantise)]
    assert rounded
    written = onnx.load(result.path)
    assert CompressionPlan.from_json(metadata(written)["plan"]) == result.plan
    opset = {each.domain: each.version for each in written.opset_import}[""]
    assert opset == (INT4_OPSET if precision == "int4_weights" else OPSETS[0])
    operators = [node.op_type for node in written.graph.node]
    assert "DequantizeLinear" in operators
    assert ("QuantizeLinear" in operators) == (precision == "int8")
    assert all(each.error < 0.5 for each in result.outputs)


@pytest.mark.parametrize(("reduce_range", "bits", "largest"), [(True, 7, 64), (False, 8, 127)])
def test_weights_in_integers_have_as_many_bits_as_asked_for(
    reduce_range: bool, bits: int, largest: int, tmp_path: Path
) -> None:
    timing = LatencyOptions(batch=2, runs=2, reduce_range=reduce_range)
    given = {"x": images(100)}
    result = compressed(convolutions(), given, tmp_path, bytes=0.3, precisions=("int8",), timing=timing)
    assert {each.weight_bits for each in result.plan.chosen(Quantise).values()} == {bits}
    tensors = map(onnx.numpy_helper.to_array, onnx.load(result.path).graph.initializer)
    integers = [each for each in tensors if each.dtype == np.int8 and each.ndim > 1]
    assert integers
    assert {int(np.abs(each.astype(int)).max()) for each in integers} == {largest}


def test_four_bits_are_refused_where_the_operator_set_cannot_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError(f"no adapter to {version}")

    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)
    with pytest.raises(OnnxGraphError, match=r"opset 13; .* need 21, .*no adapter to 21.*int8_weights"):
        compressed(convolutions(), images(), tmp_path, bytes=0.3, precisions=("int4_weights",))
    assert not (tmp_path / "small.onnx").exists()


def test_nodes_that_are_in_integers_stay_so(tmp_path: Path) -> None:
    model = tokens()
    weight = next(each for each in model.graph.initializer if each.name == "mix")
    values = onnx.numpy_helper.to_array(weight)
    scale = np.float32(np.abs(values).max() / 127)
    model.graph.initializer.remove(weight)
    model.graph.initializer.extend(
        [
            onnx.numpy_helper.from_array(np.round(values / scale).astype(np.int8), "integers"),
            onnx.numpy_helper.from_array(np.array(scale), "scale"),
        ]
    )
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["integers", "scale"], ["mix"], "back"))
    result = compressed(model, sentences(), tmp_path, params=0.8, precisions=("float32", "int8"))
    assert "its weight is in integers already" in result.untouched["mix"]
    held = {each.name: each for each in onnx.load(result.path).graph.initializer}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(held["integers"]), np.round(values / scale))


def test_a_users_score_is_reported_for_both(tmp_path: Path) -> None:
    def positive(session: onnxruntime.InferenceSession) -> float:
        return float((session.run(None, {"x": images(20)})[0] > 0).mean())

    result = compressed(convolutions(), images(), tmp_path, params=0.7, score=positive)
    for score, path in ((result.baseline_score, tmp_path / "net.onnx"), (result.score, result.path)):
        assert score == (outputs(path, {"x": images(20)})[0] > 0).mean()
    with pytest.raises(NonFiniteError, match=r"score returned nan for the original network"):
        compressed(convolutions(), images(), tmp_path, params=0.7, score=lambda _: float("nan"))


def test_the_original_in_integers_is_measured_too(tmp_path: Path) -> None:
    result = compressed(convolutions(), {"x": images(100)}, tmp_path, params=0.75)
    assert result.dense_int8 is not None
    assert 0.5 < result.dense_int8["score"] <= 1
    assert 0 < result.dense_int8["file_bytes"] < result.before["file_bytes"]
    assert result.dense_int8["latency_ratio"] > 0
    left_out = LatencyOptions(batch=2, runs=2, int8=False)
    assert (
        compressed(convolutions(), {"x": images(100)}, tmp_path, params=0.75, timing=left_out).dense_int8
        is None
    )


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    first = compressed(tokens(), sentences(), tmp_path, params=0.7).path.read_bytes()
    assert compressed(tokens(), sentences(), tmp_path, params=0.7).path.read_bytes() == first


@pytest.mark.slow
def test_a_budget_in_time_is_searched_by_whole_files(tmp_path: Path) -> None:
    timing = LatencyOptions(batch=8, runs=5)
    result = compressed(convolutions(), images(), tmp_path, latency=1.0, timing=timing, rank_multiple=1)
    assert result.latency.ratio > 0
    assert result.latency.baseline.batch == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give a budget"),
        ({"params": 1.5}, r"budget\.params=1\.5 is outside"),
        ({"params": 0.5, "macs": 0.5, "bytes": 0.5}, r"at most two budgets"),
        (
            {"params": 0.5, "decomposition": "tensor_ring"},
            r"tensor_ring cannot be written into an ONNX graph",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compressed(convolutions(), images(), tmp_path, **options)
    assert not (tmp_path / "small.onnx").exists()


@pytest.mark.parametrize("options", [{"params": 0.001}, {"bytes": 0.001, "latency": 0.5}])
def test_a_budget_out_of_reach_is_refused_before_anything_is_measured(
    options: dict[str, Any], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(file_compression.GraphNetwork, "library", None)
    monkeypatch.setattr("rankrl.request.suited_multiple", None)
    monkeypatch.setattr(file_compression, "relative_time", None)
    with pytest.raises(DecompositionError, match=r"0\.001"):
        compressed(convolutions(), images(), tmp_path, **options)
    assert not (tmp_path / "small.onnx").exists()


def test_a_network_without_a_node_to_compress_is_refused(tmp_path: Path) -> None:
    relu = model_of([helper.make_node("Relu", ["x"], ["y"], "relu")], {}, {"x": ["n", 2]}, {"y": ["n", 2]})
    with pytest.raises(OnnxGraphError, match=r"no node that can be compressed .*no Conv, Gemm or MatMul"):
        compressed(relu, np.ones((9, 2), np.float32), tmp_path, params=0.5)


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    given = images()
    given[:, 0, 0, 0] = np.nan
    with pytest.raises(OnnxGraphError, match=r"NaN or infinite values in 60 of 60 inputs; leave"):
        compressed(convolutions(), given, tmp_path, params=0.5)


@pytest.mark.parametrize("ratio", [0.8, 1.2])
def test_a_file_that_is_slower_than_the_original_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ratio: float
) -> None:
    timed = graph.compared_with_original

    def measured(*arguments: Any) -> Any:
        times = timed(*arguments)
        return dataclasses.replace(times, ratio=ratio, ratio_low=0.95 * ratio, ratio_high=1.05 * ratio)

    monkeypatch.setattr(graph, "compared_with_original", measured)
    with caplog.at_level(logging.WARNING):
        compressed(convolutions(), images(30), tmp_path, params=0.6, selector="greedy")
    assert ("the file takes 1.250 of the original's time" in caplog.text) == (ratio < 1)


def test_features_far_from_zero_lose_no_more_than_centred_ones(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype(np.float32) / 4 for shape in ((16, 24), (24, 4))]
    table = (random.standard_normal((200, 16)) @ random.standard_normal((16, 16)) / 4).astype(np.float32)
    scores = []
    for mean in (np.zeros(16, np.float32), np.linspace(-2000, 3000, 16, dtype=np.float32)):
        bias = (-mean.astype(np.float64) @ weights[0]).astype(np.float32)
        model = model_of(
            [
                helper.make_node("Gemm", ["x", "W0", "b0"], ["a"], "first"),
                helper.make_node("Relu", ["a"], ["r"], "relu"),
                helper.make_node("MatMul", ["r", "W1"], ["y"], "last"),
            ],
            {"W0": weights[0], "b0": bias, "W1": weights[1]},
            {"x": ["n", 16]},
            {"y": ["n", 4]},
        )
        result = compressed(model, {"x": table + mean}, tmp_path, bytes=0.5, precisions=("int8_weights",))
        scores.append(result.score)
        assert any(layer.operation(Quantise) is not None for layer in result.plan)
        (tmp_path / "small.onnx").unlink()
    assert scores[1] == pytest.approx(scores[0], abs=0.01)
