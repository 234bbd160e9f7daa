"""Files of one network in several runtimes, and budgets in the time of another one than onnxruntime."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from call_options import layer_options
from small_graphs import convolutions, images
from torch import nn

import rankrl
from rankrl.errors import ConfigError, ExportError
from rankrl.onnx.export import int8
from rankrl.onnx.export.int8 import nncf_obstacle, quantise_with_nncf
from rankrl.onnx.runtimes import get_runtime, open_session
from rankrl.options.timing import LatencyOptions
from rankrl.timing.network_timer import NetworkTimer
from rankrl.verify import file_export

OPENVINO = pytest.mark.skipif(get_runtime("openvino").obstacle() is not None, reason="openvino is missing")
NNCF = pytest.mark.skipif(nncf_obstacle() is not None, reason="NNCF is missing")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(convolutions(), path)
    return path


def compressed(file: Path, timing: LatencyOptions, **options: Any) -> rankrl.Compression:
    layers = layer_options(candidates=2, iterations=2, final_iterations=2, rank_multiple=1)
    target = file.parent / "run"
    return rankrl.compress(
        file, images(30), target, timing=timing, decomposition=layers, progress=False, **options
    )


@OPENVINO
def test_a_file_is_scored_and_timed_in_every_runtime(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_export, "nncf_obstacle", lambda: "NNCF is missing")
    timing = LatencyOptions(batch=4, runs=2, runtimes=("openvino",))
    section = compressed(file, timing, params=0.8).runtimes
    assert section is not None
    assert list(section) == ["onnxruntime", "openvino"]
    for entry in section.values():
        assert entry["baseline_score"] == pytest.approx(1.0, abs=1e-4)
        assert entry["dense_int8_score"] > 0.9
        assert entry["latency_ratio"] == pytest.approx(entry["baseline_latency_ms"] / entry["latency_ms"])
    first, second = section.values()
    assert first["score"] == pytest.approx(second["score"], abs=1e-3)
    assert sorted([*first.get("fastest", []), *second.get("fastest", [])]) == [
        "baseline",
        "dense_int8",
        "exported",
    ]
    assert "Fastest in" in (file.parent / "run" / "report.html").read_text()


@OPENVINO
def test_so_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_export, "nncf_obstacle", lambda: "NNCF is missing")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    timing = LatencyOptions(batch=4, runs=2, runtimes=("openvino",))
    result = rankrl.compress(
        nn.Sequential(*layers),
        torch.randn(24, 3, 8, 8),
        tmp_path / "run",
        params=0.8,
        timing=timing,
        decomposition=layer_options(candidates=2, iterations=2, rank_multiple=1),
        progress=False,
    )
    section = json.loads((tmp_path / "run" / "metrics.json").read_text())["runtimes"]
    assert section == result.runtimes
    assert section["openvino"]["score"] == pytest.approx(section["onnxruntime"]["score"], abs=1e-3)


def test_one_runtime_needs_no_table(file: Path) -> None:
    assert compressed(file, LatencyOptions(batch=4, runs=2), params=0.8).runtimes is None


@OPENVINO
def test_layers_plans_and_files_are_timed_where_the_budget_goes_by(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    for where in ("rankrl.timing.latency", "rankrl.timing.latency"):

        def look(path: Path, *, runtime: str = "onnxruntime", **options: Any) -> Any:
            opened.append(runtime)
            return open_session(path, runtime=runtime, **options)

        monkeypatch.setattr(f"{where}.open_session", look)
    monkeypatch.setattr(file_export, "runtime_numbers", lambda *_, **__: None)
    monkeypatch.setattr("rankrl.networks.graph.runtime_numbers", lambda *_, **__: None)
    whole = NetworkTimer.whole
    monkeypatch.setattr(
        NetworkTimer, "whole", lambda *a: type(whole(*a))(0.5)
    )  # so small a network gets no faster
    result = compressed(file, LatencyOptions(batch=4, runs=2, runtime="openvino"), latency=0.9)
    assert set(opened) == {"openvino"}
    assert result.numbers["runtime"] == "openvino"


def test_a_runtime_that_cannot_be_used_is_refused_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    for options in ({"runtime": "openvino"}, {"runtimes": ("onnxruntime", "openvino")}):
        with pytest.raises(ConfigError, match=rf"export\.{next(iter(options))}: .* 'rankrl\[openvino\]'"):
            compressed(file, LatencyOptions(**options), latency=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no runtime 'openvin'"):
        compressed(file, LatencyOptions(runtime="openvin"), latency=0.5)


def test_without_nncf_one_sentence_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ExportError, match=r"needs the package (nncf|openvino); install it with .*\[nncf\]"):
        quantise_with_nncf(file, file.with_suffix(".xml"), [images(4)])
    assert int8.nncf_obstacle() is not None


@NNCF
@pytest.mark.slow
def test_nncfs_file_computes_nearly_what_the_original_does(file: Path) -> None:
    target = quantise_with_nncf(file, file.with_suffix(".xml"), [images(8)] * 4)
    name = onnx.load(file).graph.input[0].name
    expected = open_session(file).run({name: images(8)})[0]
    outputs = open_session(target, threads=1, runtime="openvino").run({name: images(8)})[0]
    assert np.abs(outputs - expected).max() <= 0.1 * np.abs(expected).max()
