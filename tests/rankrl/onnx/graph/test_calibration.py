"""Moments of inputs and sensitivities of outputs, beside those of the same network in PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import layer_options
from onnx import TensorProto, helper, numpy_helper
from small_graphs import (
    Array,
    convolutions,
    drawn,
    images,
    model_of,
    network_of,
    of_low_rank,
    sentences,
    tokens,
)
from torch import nn

import rankrl
from decomposition import DecompositionError, compressible_layers
from decomposition import collect_moments as torch_moments
from decomposition import collect_sensitivities as torch_sensitivities
from decomposition.calibration.metric import RowFactor, whole
from rankrl import compress
from rankrl.networks.graph import measured_sensitivities
from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph import OnnxGraphError, OnnxNetwork, PreparedFile, calibration, find_sites
from rankrl.onnx.graph.calibration import passes_for
from rankrl.onnx.graph.inputs import split_inputs
from rankrl.onnx.graph.sites import Site


def torch_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(96, 4),
    ).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, OnnxNetwork]:
    network, path = torch_network(), tmp_path_factory.mktemp("exported") / "net.onnx"
    export_onnx(network, path, (3, 10, 9))
    return network, OnnxNetwork.load(path)


def test_moments_are_those_of_pytorch(exported: tuple[nn.Module, OnnxNetwork]) -> None:
    network, file = exported
    x = images(20)
    feeds = [{file.inputs[0].name: part} for part in np.split(x, 4)]
    sites = find_sites(file, feeds[0])
    found = calibration.collect_moments(file, sites, feeds)
    specs = compressible_layers(network, (3, 10, 9))
    expected = torch_moments(network, specs, torch.from_numpy(x))
    for site, spec in zip(sites, specs, strict=True):
        assert (site.spec.macs, site.spec.params) == (spec.macs, spec.params)
        torch.testing.assert_close(
            whole(found[site.name].covariance), whole(expected[spec.name].covariance), rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(found[site.name].mean, expected[spec.name].mean, rtol=1e-3, atol=1e-5)


def test_perturbed_outputs_give_the_sensitivity_that_gradients_give(
    exported: tuple[nn.Module, OnnxNetwork],
) -> None:
    network, file = exported
    x = images(60)
    feeds = [{file.inputs[0].name: x}]
    sites = find_sites(file, feeds[0])
    found = calibration.collect_sensitivities(file, sites, feeds, passes=10**6)
    specs = compressible_layers(network, (3, 10, 9))
    expected = torch_sensitivities(network, specs, torch.from_numpy(x).repeat(20, 1, 1, 1))
    for site, spec in zip(sites, specs, strict=True):
        ours, theirs = found[site.name], expected[spec.name]
        cosine = float((ours * theirs).sum() / ours.norm() / theirs.norm())
        assert cosine > 0.95


def test_what_no_output_depends_on_has_no_sensitivity(tmp_path: Path) -> None:
    network = network_of(tokens(), tmp_path)
    split = split_inputs(sentences(), network)
    sites = find_sites(network, split.calibration[0])
    found = calibration.collect_sensitivities(network, sites, split.calibration)
    assert set(found) == {"mix", "along"}
    model = tokens()
    del model.graph.output[0]  # the convolution's
    onnx.save(model, tmp_path / "states.onnx")
    shorter = OnnxNetwork.load(tmp_path / "states.onnx")
    assert set(calibration.collect_sensitivities(shorter, sites, split.calibration)) == {"mix"}


def test_sensitivities_of_the_same_network_and_inputs_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(tokens(), tmp_path / "net.onnx")
    file = PreparedFile.read(tmp_path / "net.onnx", sentences())
    folder = tmp_path / "fits"
    calls: list[str] = []
    measure = calibration._Measurement.of_nodes

    def spied(self: calibration._Measurement, site: Site, passes: int, seed: int) -> dict[str, torch.Tensor]:
        calls.append(site.name)
        return measure(self, site, passes, seed)

    monkeypatch.setattr(calibration._Measurement, "of_nodes", spied)
    measured = measured_sensitivities(file, folder=folder)
    assert calls == [site.name for site in file.usable]
    again = measured_sensitivities(file, folder=folder)
    assert calls == [site.name for site in file.usable]
    assert set(again) == set(measured)
    assert all(torch.equal(again[name], each) for name, each in measured.items())
    for each, seed in ((file, 1), (PreparedFile.read(tmp_path / "net.onnx", sentences(150)), 0)):
        calls.clear()
        measured_sensitivities(each, folder=folder, seed=seed)
        assert calls == [site.name for site in file.usable]


def test_a_killed_measurement_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(tokens(), tmp_path / "net.onnx")
    file = PreparedFile.read(tmp_path / "net.onnx", sentences())
    expected = measured_sensitivities(file)
    calls: list[str] = []
    measure = calibration._Measurement.of_nodes

    def interrupted(
        self: calibration._Measurement, site: Site, passes: int, seed: int
    ) -> dict[str, torch.Tensor]:
        calls.append(site.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, site, passes, seed)

    monkeypatch.setattr(calibration._Measurement, "of_nodes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured_sensitivities(file, folder=tmp_path / "fits")
    resumed = measured_sensitivities(file, folder=tmp_path / "fits")
    assert calls.count(calls[0]) == 1
    assert set(resumed) == set(expected)
    assert all(torch.equal(resumed[name], each) for name, each in expected.items())


def test_memory_is_bounded_by_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(convolutions(), tmp_path)
    feeds = [{"x": images(32)}]
    sites = find_sites(network, feeds[0])
    expected = calibration.collect_moments(network, sites, feeds)
    seen: list[int] = []
    run = calibration.Captured.run

    def spied(self: calibration.Captured, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = run(self, feed)
        seen.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(calibration, "_CAPTURED", 20_000)
    monkeypatch.setattr(calibration.Captured, "run", spied)
    found = calibration.collect_moments(network, sites, feeds)
    assert max(seen) <= 20_000
    for name, moments in expected.items():
        torch.testing.assert_close(
            whole(found[name].covariance), whole(moments.covariance), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(("macs", "passes"), [(0, 8192), (10**7, 8192), (10**8, 4000), (4 * 10**9, 2048)])
def test_smaller_networks_are_perturbed_more_often(macs: int, passes: int) -> None:
    assert passes_for(macs) == passes


def test_a_node_that_no_input_reaches_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["now"], name="present"),
        helper.make_node("MatMul", ["past", "B"], ["then"], name="past"),
        helper.make_node("Concat", ["then", "now"], ["all"], axis=1),
        helper.make_node("ReduceSum", ["all", "time"], ["sum"], keepdims=0),
        helper.make_node("Relu", ["sum"], ["h"]),
        helper.make_node("MatMul", ["h", "C"], ["y"], name="out"),
    ]
    constants = {"A": drawn(12, 24), "B": drawn(12, 24), "C": drawn(24, 6), "time": np.array([1])}
    ends: dict[str, list[object]] = {"x": ["n", 4, 12], "past": ["n", "t", 12]}
    onnx.save(model_of(nodes, constants, ends, {"y": ["n", 6]}), tmp_path / "net.onnx")
    inputs = {"x": drawn(60, 4, 12), "past": np.zeros((60, 0, 12), np.float32)}
    small = tmp_path / "small.onnx"
    result = compress(tmp_path / "net.onnx", inputs, small, decomposition="cp", params=0.75)
    assert {layer.name: bool(layer.operations) for layer in result.plan}["past"] is False
    assert result.untouched["past"] == "none of the calibration inputs reaches it"
    assert "past: none of the calibration inputs gets there" in caplog.text
    weights = [numpy_helper.to_array(each) for each in onnx.load(small).graph.initializer]
    assert any(each.shape == (12, 24) and (each == constants["B"]).all() for each in weights)


def test_what_is_too_wide_for_a_matrix_has_none(
    exported: tuple[nn.Module, OnnxNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = exported
    feeds = [{file.inputs[0].name: images(20)}]
    sites = find_sites(file, feeds[0])
    monkeypatch.setattr(calibration, "WIDEST", 6)
    monkeypatch.setattr("decomposition.calibration.metric.WIDEST", 30)
    found = calibration.collect_sensitivities(file, sites, feeds, passes=600)
    assert set(found) == {site.name for site in sites[1:]}  # the first has 8 outputs
    kept = [calibration.collect_moments(file, sites, feeds)[site.name].covariance for site in sites]
    assert [isinstance(each, RowFactor) for each in kept] == [False, True, True]  # 27, 72 and 96 inputs
    monkeypatch.setattr("decomposition.memory.free_memory", lambda: 1000)
    with pytest.raises(DecompositionError, match="second moments of the inputs of 3 layers take"):
        calibration.collect_moments(file, sites, feeds)


VALID = np.random.default_rng(0).random((60, 6, 1)) < 0.7
X = drawn(60, 6, 16)
GAPS = np.where(VALID, X, np.nan).astype(np.float32)
CALL: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=2, runs=2, int8=False), "progress": False}


def masked(kind: str) -> onnx.ModelProto:
    """Positions that are masked behind the first product, in front of it, or not at all."""
    node = helper.make_node
    first = {
        "behind": [
            node("MatMul", ["x", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "zero"], ["b"], "mask"),
        ],
        "in front": [
            node("Where", ["valid", "x", "zero"], ["a"], "mask"),
            node("MatMul", ["a", "first"], ["b"], "first"),
        ],
        "of its own": [
            node("Where", ["valid", "x", "nan"], ["gaps"], "gaps"),
            node("MatMul", ["gaps", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "zero"], ["b"], "mask"),
        ],
        "never": [
            node("MatMul", ["x", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "a"], ["b"], "mask"),
        ],
    }[kind]
    nodes = [
        *first,
        node("Relu", ["b"], ["c"], "relu"),
        node("MatMul", ["c", "second"], ["d"], "second"),
        node("ReduceMax", ["d"], ["y"], "most", axes=[1], keepdims=0),
    ]
    constants = {
        "first": of_low_rank(32, 16, 4).T.copy(),
        "second": of_low_rank(8, 32, 3).T.copy(),
        "zero": np.float32(0),
        "nan": np.float32(np.nan),
    }
    inputs = {"x": ["n", 6, 16], "valid": ["n", 6, 1]}
    return model_of(nodes, constants, inputs, {"y": ["n", 8]}, types={"valid": TensorProto.BOOL})


def saved(folder: Path, kind: str) -> tuple[Path, dict[str, Array]]:
    path = folder / "net.onnx"
    onnx.save(masked(kind), path)
    return path, {"x": X if kind == "of its own" else GAPS, "valid": VALID}


@pytest.mark.parametrize(
    ("kind", "holds"),
    [("behind", r"hold NaN or infinite values in \d+ of 60"), ("of its own", "computes NaN or infinite")],
)
def test_a_node_that_sees_masked_gaps_is_left_where_it_is_skipped(
    kind: str, holds: str, tmp_path: Path
) -> None:
    path, feed = saved(tmp_path, kind)
    (expected,) = onnxruntime.InferenceSession(path).run(None, feed)
    assert np.isfinite(expected).all()
    with pytest.raises(OnnxGraphError, match=rf"{holds}.*masks them, .*skip=\['first'\], or fill the gaps"):
        rankrl.compress(
            path, feed, tmp_path / "small.onnx", params=0.8, decomposition=layer_options("tucker"), **CALL
        )
    options = layer_options("tucker", skip=["first"])
    result = rankrl.compress(path, feed, tmp_path / "small.onnx", params=0.9, decomposition=options, **CALL)
    (found,) = onnxruntime.InferenceSession(result.path).run(None, feed)
    assert np.linalg.norm(found - expected) < 0.3 * np.linalg.norm(expected)


def test_gaps_that_are_filled_in_front_of_all_nodes_hurt_nothing(tmp_path: Path) -> None:
    path, feed = saved(tmp_path, "in front")
    result = rankrl.compress(
        path, feed, tmp_path / "small.onnx", params=0.7, decomposition=layer_options("tucker"), **CALL
    )
    assert result.after["params"] <= 0.7 * result.before["params"]


def test_gaps_that_reach_the_outputs_are_to_be_left_out(tmp_path: Path) -> None:
    path, feed = saved(tmp_path, "never")
    with pytest.raises(OnnxGraphError, match="of 60 inputs; leave such inputs out"):
        rankrl.compress(
            path, feed, tmp_path / "small.onnx", params=0.8, decomposition=layer_options("tucker"), **CALL
        )
