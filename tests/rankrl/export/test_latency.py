"""Latency: what is reported, not how long it took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rankrl.export import ExportError, compare_latency, export_onnx, latency, measure_latency

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]


@pytest.fixture
def path(make: Maker, tmp_path: Path) -> Path:
    export_onnx(make("plain"), tmp_path / "model.onnx", SHAPE)
    return tmp_path / "model.onnx"


def test_a_latency_states_how_it_was_measured(path: Path) -> None:
    measured = measure_latency(path, batch=5, threads=2, runs=7)
    assert (measured.batch, measured.threads, measured.runs) == (5, 2, 7)
    assert 0 < measured.low_ms <= measured.median_ms <= measured.high_ms
    assert str(measured).endswith("batch 5, 2 threads")


def test_two_models_are_timed_in_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    sessions: list[object] = []
    original = latency.open_session

    def remember(*args: object, **options: object) -> object:
        sessions.append(original(*args, **options))  # type: ignore[arg-type]
        return sessions[-1]

    monkeypatch.setattr(latency, "open_session", remember)
    monkeypatch.setattr(latency, "run", lambda session, values: order.append(sessions.index(session)))
    compare_latency(path, path, batch=2, runs=4, warm_up=0)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]


def test_the_ratio_is_baseline_over_compressed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 6_000_000, 0, 2_000_000, 0, 2_000_000, 0, 6_000_000])
    monkeypatch.setattr(latency.time, "perf_counter_ns", lambda: next(ticks))
    compared = compare_latency(path, path, batch=2, runs=2, warm_up=0)
    assert compared.baseline.median_ms == 6
    assert compared.compressed.median_ms == 2
    assert compared.ratio == compared.ratio_low == compared.ratio_high == 3


@pytest.mark.parametrize("option", ["batch", "threads", "runs"])
def test_options_out_of_range_are_refused(path: Path, option: str) -> None:
    with pytest.raises(ExportError, match=f"{option} is 0; it must be at least 1"):
        measure_latency(path, **{option: 0})


def test_a_fixed_batch_must_be_the_one_asked_for(make: Maker, tmp_path: Path) -> None:
    path = tmp_path / "fixed.onnx"
    export_onnx(make("plain"), path, SHAPE, dynamic_batch=False, sample=torch.zeros(4, *SHAPE))
    assert measure_latency(path, batch=4, runs=1).batch == 4
    with pytest.raises(ExportError, match="exported for batches of 4"):
        measure_latency(path, batch=8, runs=1)
