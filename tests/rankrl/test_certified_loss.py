"""What a compressed network loses has an interval wherever single inputs have scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import grouped
from small_graphs import convolutions, images
from torch import nn

import rankrl
from rankrl.verify.agreement import certify

QUICK: dict[str, Any] = {
    "candidates": 3,
    "iterations": 5,
    "final_iterations": 5,
    "timing": rankrl.LatencyOptions(batch=2, runs=2),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def certified(count: int, folder: Path, **options: Any) -> rankrl.Compression:
    """Compress the network on inputs without labels."""
    how = {"selector": "greedy", "progress": False, **options}
    return rankrl.compress(network(), torch.randn(count, 12), folder, **how, **grouped(**QUICK))


def test_test_inputs_say_what_a_module_loses(tmp_path: Path) -> None:
    model, x = network().eval(), torch.randn(300, 12)
    with torch.no_grad():
        labels = (model(x) + 0.5 * torch.randn(300, 4)).argmax(1)
    result = rankrl.compress(
        model,
        (x[:200], labels[:200]),
        tmp_path,
        test=(x[200:], labels[200:]),
        params=0.4,
        selector="greedy",
        progress=False,
        **grouped(**QUICK),
    )
    right = [(each(x[200:]).argmax(1) == labels[200:]).numpy() for each in (model, result.model)]
    expected = certify(*right)
    assert expected is not None
    assert result.certificate is not None
    assert result.certificate.inputs == 100
    assert result.test is not None
    assert result.certificate.loss == pytest.approx(result.test["baseline"] - result.test["compressed"])
    assert (result.certificate.low, result.certificate.high) == (expected.low, expected.high)
    numbers = json.loads((tmp_path / "metrics.json").read_text())["certificate"]
    assert (numbers["unit"], numbers["what"], numbers["inputs"]) == ("accuracy", "test inputs", 100)
    assert "On 100 test inputs it " in (tmp_path / "report.html").read_text()


def test_inputs_that_chose_certify_nothing(tmp_path: Path) -> None:
    assert certified(200, tmp_path, params=0.4).certificate is None


def test_half_of_what_is_held_out_certifies_a_loss_that_is_accepted(tmp_path: Path) -> None:
    result = certified(400, tmp_path, drop=0.2, minimise="params")
    found = result.certificate
    assert found is not None
    assert (found.inputs, found.drop, found.basis.independent) == (40, 0.2, True)
    assert found.certified == (found.high <= 0.2)
    page = (tmp_path / "report.html").read_text()
    assert "On 40 unseen held-out inputs it " in page
    layers = json.loads((tmp_path / "metrics.json").read_text())["layers"]
    assert "Share of the loss" in page
    compressed = {layer.name for layer in result.plan if layer.operations}
    assert {layer["name"] for layer in layers} == compressed
    assert [layer["loss"] for layer in layers] == sorted((layer["loss"] for layer in layers), reverse=True)
    saved = result.before["params"] - result.after["params"]
    assert sum(layer["saved_params"] for layer in layers) == saved


def test_one_number_is_no_certificate(tmp_path: Path) -> None:
    result = certified(100, tmp_path, drop=0.5, minimise="params", score=lambda _: 1.0)
    assert result.certificate is None
    assert "Nothing certifies its loss: your score is one number" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("own", [False, True])
def test_heldout_inputs_say_what_a_file_loses(tmp_path: Path, own: bool) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    x = images(60)
    seen = []

    def score(session: onnxruntime.InferenceSession) -> Any:
        seen.append(1 / (1 + np.abs(session.run(None, {"x": x})[0]).mean(1)))
        return seen[-1]

    result = rankrl.compress(
        tmp_path / "net.onnx",
        {"x": x},
        tmp_path / "run",
        params=0.6,
        selector="greedy",
        **({"score": score} if own else {}),
        **grouped(**QUICK),
    )
    found = result.certificate
    assert found is not None
    assert found.loss == pytest.approx(result.baseline_score - result.score)
    assert found.inputs == (60 if own else result.heldout)
    assert (found.basis.unit, found.basis.independent) == (("score", False) if own else ("agreement", True))
    assert found.low <= found.loss <= found.high
    if own:
        assert result.score == pytest.approx(seen[-2].mean())  # the last one is that of the original in int8
    numbers = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert numbers["certificate"]["high"] == found.high
    assert own or set(numbers["outputs"]["y"]) >= {"score", "score_kind", "scored_by", "reason"}
