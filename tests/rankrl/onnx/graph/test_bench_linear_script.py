"""The table of linear layers: every method is what its source says, and errors are those of real outputs."""

from __future__ import annotations

from pathlib import Path

import bench_linear as bench
import numpy as np
import onnx
import pytest
import torch
from small_graphs import Array, convolutions, images

from rankrl.onnx.graph import PreparedFile
from rankrl.onnx.graph.capture import Captured

pytestmark = pytest.mark.slow


@pytest.fixture
def given(tmp_path: Path) -> PreparedFile:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    return PreparedFile.read(tmp_path / "net.onnx", images(81), heldout=1e-9)


@pytest.fixture
def layer(given: PreparedFile) -> bench.Layer:
    (found,) = bench.linear_layers(given)
    return found


def received(given: PreparedFile, x: Array) -> Array:
    """What the linear layer gets."""
    return Captured(given.network.graph_model(), ["f"], "net").run({"x": x})["f"].astype(np.float64)


def least(left: Array, weight: Array, right: Array, rank: int) -> float:
    """What every V of a rank leaves at least of |left (W - V) right|: Eckart and Young, by numpy."""
    return float(np.linalg.norm(np.linalg.svd(left @ weight @ right, compute_uv=False)[rank:]))


def root(matrix: Array) -> Array:
    values, vectors = np.linalg.eigh(matrix)
    # What is zero may come out as less, by the last bit, on some processors.
    return np.asarray(vectors * np.sqrt(values.clip(min=0))) @ vectors.T


def test_methods_are_what_their_sources_say(given: PreparedFile, layer: bench.Layer) -> None:
    x = np.concatenate([received(given, feed["x"]) for feed in given.split.calibration])
    weight, inputs, outputs = layer.weight.numpy(), x.T @ x / len(x), layer.sensitivity.numpy()
    nothing, plain = np.eye(len(weight)), np.eye(weight.shape[1])
    expected = {
        "SVD": (nothing, plain),
        "FWSVD": (np.diag(np.sqrt(np.diag(outputs))), plain),
        "ASVD": (nothing, np.diag(np.sqrt(np.abs(x).mean(0)))),
        "DRONE, SVD-LLM": (nothing, root(inputs)),
        "inputs and outputs": (root(outputs), root(inputs)),
    }
    assert [*expected, "the same, shrunk"] == list(bench.METHODS)
    for name, (left, right) in expected.items():
        found = torch.matmul(*bench.METHODS[name](layer).halves(2)).numpy()
        lost = np.linalg.norm(left @ (weight - found) @ right)
        assert lost == pytest.approx(least(left, weight, right, 2), rel=1e-2), name


def test_errors_and_accuracies_are_those_of_the_outputs(given: PreparedFile, layer: bench.Layer) -> None:
    x = images(40)
    tested = bench.Tested(given, [layer], {"x": x}, None)
    assert tested.accuracy({}) == 1
    changed = layer.weight.clone()
    changed[0] = 0
    seen = received(given, x)
    before, after = (seen @ weight.numpy().T for weight in (layer.weight, changed))
    expected = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert tested.error("last", changed) == pytest.approx(expected, rel=1e-3)
    bias = layer.site.bias.numpy()
    same = ((before + bias).argmax(1) == (after + bias).argmax(1)).mean()
    assert tested.accuracy({"last": changed}) == pytest.approx(same)
    assert tested.accuracy({}) == 1  # the weights of before are back
    labels = np.zeros(40, dtype=np.int64)
    assert bench.Tested(given, [layer], {"x": x}, labels).accuracy({}) == pytest.approx(
        ((before + bias).argmax(1) == 0).mean()
    )


def test_the_table_has_a_row_for_every_method(
    given: PreparedFile, layer: bench.Layer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench.table([layer], bench.Tested(given, [layer], {"x": images(20)}, None), [0.9, 0.5])
    assert [row.split("|")[1].strip() for row in rows] == [*bench.METHODS, bench.PIVOTED]
    assert {row.count("|") for row in rows} == {4}
    assert capsys.readouterr().out.splitlines() == rows
    assert layer.rank(0.9) == int(0.9 * 5 * 32 / 37)
    assert layer.rank(0.5) == layer.rank(0.5, pivoted=True) == 2
    assert layer.rank(0.9, pivoted=True) == 4  # 4 * 37 - 16 = 132 of 144; 5 would hold as many as the weight


def test_the_small_transformer_is_a_classifier_of_patches_of_four() -> None:
    from small_transformer import small_transformer

    model = small_transformer(width=32, depth=1, num_classes=7).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert model.seq_length == 1 + 8 * 8
