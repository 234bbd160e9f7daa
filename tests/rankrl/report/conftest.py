"""A run folder of plausible numbers that were made up for these tests."""

import csv
import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rankrl.plan_search.scores.evaluation import EPISODE_COLUMNS, EpisodeRow
from rankrl.report import LayerRow, RunReport
from rankrl.training import EpochRow


def make_layers() -> list[LayerRow]:
    """The layers of a CIFAR ResNet-20 with ranks that grow with the width."""
    rows = []
    widths = [("conv1", 3, 16, 32)] + [
        (f"layer{stage}.{block}.conv{conv}", _width_in(stage, block, conv), 8 * 2**stage, 64 >> stage)
        for stage in (1, 2, 3)
        for block in range(3)
        for conv in (1, 2)
    ]
    for index, (name, channels_in, channels_out, size) in enumerate(widths):
        params = channels_in * channels_out * 9
        rank = 3 + index // 3 + index % 2
        after = rank * rank * (channels_in + channels_out + 9)
        dense = index < 2 or after >= params
        rows.append(
            LayerRow(
                name=name,
                shape=(channels_out, channels_in, 3, 3),
                ranks=() if dense else (rank, rank + index % 3, rank),
                params_before=params,
                params_after=params if dense else after,
                macs_before=params * size * size,
                macs_after=(params if dense else after) * size * size,
                error=0.0 if dense else 0.08 + 0.01 * (index % 7),
                reason="would be no faster" if dense else "",
            )
        )
    return rows


def _width_in(stage: int, block: int, conv: int) -> int:
    first = stage > 1 and block == 0 and conv == 1
    return 8 * 2 ** (stage - 1 if first else stage)


def make_episodes(count: int = 120) -> list[EpisodeRow]:
    """A greedy plan, a warm-up, and a search that learns."""
    generator = random.Random(0)
    rows: list[EpisodeRow] = []
    best = -math.inf
    for episode in range(count):
        phase = "preset" if episode == 0 else "warm-up" if episode < count // 5 else "search"
        learned = max(0.0, (episode - count / 5) / count)
        reward = (
            0.738
            if phase == "preset"
            else 0.52 + 0.27 * learned**0.5 + generator.gauss(0, 0.06 - 0.04 * learned)
        )
        best = max(best, reward)
        rows.append(
            EpisodeRow(
                episode=episode,
                reward=reward,
                score=reward,
                accuracy=min(1.0, reward + 0.02),
                params_kept=0.4,
                macs_kept=0.48,
                best_reward=best,
                cached=episode % 7 == 6,
                seconds=0.6,
                phase=phase,
                choices=json.dumps([3, episode]),
            )
        )
    return rows


def make_metrics() -> dict[str, Any]:
    return {
        "task": "pipeline",
        "model": "resnet20",
        "dataset": "cifar10",
        "decomposition": "tensor_ring",
        "selector": "ddpg",
        "seed": 0,
        "baseline": {"accuracy": 0.9173, "params": 269_722, "macs": 40_551_040},
        "compressed": {"accuracy": 0.7412, "params": 107_689, "macs": 19_461_888},
        "finetuned": {"accuracy": 0.9056},
        "ratios": {"params": 269_722 / 107_689, "macs": 40_551_040 / 19_461_888, "latency": 1.31},
        "search": {"episodes": 120, "evaluations": 118, "seconds": 72.0, "best_reward": 0.768},
        "onnx": {
            "max_abs_difference": 3.2e-6,
            "accuracy": 0.9056,
            "latency_ms": 17.62,
            "latency_median_ms": 18.1,
            "latency_high_ms": 18.9,
            "baseline_latency_ms": 23.08,
            "baseline_latency_median_ms": 23.4,
            "baseline_latency_high_ms": 24.1,
            "batch": 64,
            "threads": 1,
            "file_bytes": 451_220,
        },
    }


def make_epochs(count: int = 12) -> list[EpochRow]:
    return [
        EpochRow(
            epoch=epoch,
            lr=0.01 * (1 - epoch / (count + 1)),
            loss=0.35 + 0.9 * math.exp(-epoch / 3),
            accuracy=0.905 - 0.16 * math.exp(-epoch / 2.5),
            seconds=31.0,
        )
        for epoch in range(1, count + 1)
    ]


SETUP = {
    "Command": "rankrl model=resnet20 dataset=cifar10 decomposition=tensor_ring budget.params=0.4",
    "Seed": "0",
    "Versions": "Python 3.11.9, rankrl 0.1.0, torch 2.15.0, onnxruntime 1.31.1",
    "Processor": "an example processor, 2 cores",
}


def fill_run_folder(folder: Path) -> Path:
    """Write the made-up metrics and episodes into a folder."""
    (folder / "metrics.json").write_text(json.dumps(make_metrics()))
    with (folder / "episodes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, EPISODE_COLUMNS)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in make_episodes())
    return folder


@pytest.fixture(scope="session")
def whole_run() -> RunReport:
    return RunReport(make_metrics(), make_layers(), make_episodes(), make_epochs(), SETUP)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of pages empty: where words alone are looked at, drawing takes most of the time."""
    monkeypatch.setattr("rankrl.report.figures.inline_svg", lambda *_: "<svg></svg>")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return fill_run_folder(tmp_path)


@pytest.fixture
def layers() -> list[LayerRow]:
    return make_layers()


@pytest.fixture
def episodes() -> list[EpisodeRow]:
    return make_episodes()


@pytest.fixture
def epochs() -> list[EpochRow]:
    return make_epochs()


@pytest.fixture
def metrics() -> dict[str, Any]:
    return make_metrics()
