"""Limits of a call besides its budgets: memory of activations, and seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankrl
from decomposition import DecompositionError
from decomposition.progress import Deadline
from rankrl.errors import ConfigError
from rankrl.result import missed_latency
from rankrl.timing.latency import Latency, LatencyComparison

pytestmark = pytest.mark.usefixtures("staged_files", "no_report")

IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
DECOMPOSITION: dict[str, Any] = {"format": "tucker", "candidates": 3, "iterations": 3, "final_iterations": 3}
TIMING = rankrl.LatencyOptions(batch=2, runs=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.Flatten(), nn.Linear(192, 4))
    return nn.Sequential(*layers).eval()


def given(kind: str, folder: Path) -> tuple[Any, Any]:
    if kind == "module":
        return network(), IMAGES
    path = folder / "net.onnx"
    rankrl.export_onnx(network(), path, (3, 8, 8))
    return path, IMAGES.numpy()


def numbers(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))


@pytest.mark.parametrize("kind", ["module", "file"])
def test_a_limit_of_memory_is_kept_by_the_finished_file(kind: str, tmp_path: Path) -> None:
    model, inputs = given(kind, tmp_path)
    options = rankrl.DecompositionOptions(**DECOMPOSITION)
    run = tmp_path / "run"
    found = rankrl.compress(
        model, inputs, run, memory=0.4, params=0.9, decomposition=options, timing=TIMING, progress=False
    )
    before, after = found.before["activation_bytes"], found.after["activation_bytes"]
    channels = max(12, TIMING.channel_block) if kind == "module" else 12  # an export fills up channels
    assert before == 4 * 2 * channels * 36  # both ends of the ReLU
    assert after <= 0.4 * before
    assert found.missed is None
    assert found.after["params"] <= 0.9 * found.before["params"]
    metrics = numbers(run)
    assert metrics["budget"] == {"params": 0.9, "memory": 0.4}
    assert metrics["compressed"]["activation_bytes"] == after
    assert metrics["ratios"]["activation_bytes"] == before / after


def test_a_limit_that_no_plan_reaches_is_refused(tmp_path: Path) -> None:
    options = rankrl.DecompositionOptions(**DECOMPOSITION, precisions=("float32",))
    with pytest.raises(
        DecompositionError, match=r"budget.memory=0.4 cannot be reached: the node .* least is 1\."
    ):
        rankrl.compress(network(), IMAGES, tmp_path, memory=0.4, decomposition=options, timing=TIMING)


@pytest.mark.parametrize("memory", [0, 1.5, float("nan")])
def test_memory_is_a_fraction(memory: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budget.memory=.* is outside \(0, 1\]"):
        rankrl.compress(network(), IMAGES, tmp_path, memory=memory)


class Soon(Deadline):
    """Is over after it was asked so often; a call asks once for every layer but the last, then for steps."""

    allowed = 4

    def over(self) -> bool:
        Soon.allowed -= 1
        self.stopped = self.stopped or Soon.allowed <= 0
        return self.stopped


@pytest.mark.parametrize("kind", ["module", "file"])
def test_seconds_end_a_call_with_the_best_plan_so_far(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankrl.request.Deadline", Soon)
    monkeypatch.setattr(Soon, "allowed", 4)
    model, inputs = given(kind, tmp_path)
    told: list[str] = []
    found = rankrl.compress(
        model,
        inputs,
        tmp_path / "run",
        params=0.6,
        selector="random",
        search=rankrl.SearchOptions(episodes=30, seconds=60),
        decomposition=rankrl.DecompositionOptions(**DECOMPOSITION),
        timing=TIMING,
        progress=lambda stage, *_: told.append(stage),
    )
    fitted = {"module": ["fit layers"], "file": ["perturb nodes", "fit layers"]}[kind]
    applied = {"module": "apply plan", "file": "refit nodes"}[kind]
    assert [*dict.fromkeys(told)] == [*fitted, "search", applied, "finish"]
    metrics = numbers(tmp_path / "run")
    assert metrics["search"]["stopped_by"] == "seconds"
    assert 1 <= metrics["search"]["episodes"] < 30
    assert found.after["params"] <= 0.6 * found.before["params"]


def test_too_few_seconds_for_the_fits_say_how_many_are_needed(tmp_path: Path) -> None:
    search = rankrl.SearchOptions(seconds=1e-6)
    with pytest.raises(ConfigError, match=r"search.seconds=1e-06 is over with 1 of 3 layers fitted"):
        rankrl.compress(network(), IMAGES, tmp_path, params=0.6, search=search, timing=TIMING, progress=False)


def test_a_rule_leaves_rivals_unmeasured_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankrl.request.Deadline", Soon)
    monkeypatch.setattr(Soon, "allowed", 3)
    found = rankrl.compress(
        network(),
        IMAGES,
        tmp_path,
        bytes=0.5,
        search=rankrl.SearchOptions(seconds=60),
        decomposition=rankrl.DecompositionOptions(**DECOMPOSITION),
        timing=TIMING,
        progress=False,
    )
    assert found.plan.chosen_by == "greedy"
    assert numbers(tmp_path)["search"] == {"stopped_by": "seconds"}


@pytest.mark.parametrize(
    ("high", "search", "told"),
    [
        (2.1, None, None),  # the interval reaches the budget
        (2.1, "the search's", None),  # and decides, whatever the search timed
        (1.9, "the search's", "the search's"),
        (1.9, None, "keeps 0.556 of the original's time, the original in 8-bit integers 0.625."),
    ],
)
def test_the_interval_of_the_finished_file_decides_whether_a_budget_is_missed(
    high: float, search: str | None, told: str | None
) -> None:
    latency = Latency(1.0, 1.0, 1.0, batch=1, threads=1, runs=9, clock="wall")
    times = LatencyComparison(latency, latency, 1.8, 1.7, high, None)
    missed = missed_latency(0.5, times, search, {"latency_ratio": 1.6})
    assert missed is None if told is None else told in str(missed)


@pytest.mark.parametrize("seconds", [0, -1, "600"])
def test_seconds_are_a_positive_number(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="seconds must be"):
        rankrl.SearchOptions(seconds=seconds)
