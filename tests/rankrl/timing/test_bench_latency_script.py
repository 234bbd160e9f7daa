"""The benchmark of budgets in time reports what it exported."""

from __future__ import annotations

from pathlib import Path

import bench_latency
import pytest
import torch
from torch import nn

from rankrl.data import Images
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.timing.latency import RelativeTime

pytestmark = pytest.mark.slow

QUICK = [
    "--dataset",
    "digits",
    "--models",
    "conv4",
    "--formats",
    "tucker",
    "--multiples",
    "8",
    "--batch",
    "2",
    "--runs",
    "2",
]
QUICK += [
    "--float-latency",
    "--precisions",
    "float32",
    "--candidates",
    "2",
    "--iterations",
    "0",
    "--images",
    "32",
]


def small() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole networks are as fast as the test needs them, and small."""
    monkeypatch.setattr(bench_latency, "create_model", lambda name, **_: small())
    monkeypatch.setattr(LatencyBudget, "measured", lambda budget, plan: RelativeTime(0.9))


def test_a_row_holds_the_measured_fraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    bench_latency.main([*QUICK, "--latency", "0.95", "--predictions", "2", "--output", str(page)])
    text = page.read_text()
    (predicted,) = (line for line in text.splitlines() if line.startswith("| conv4 | 2 |"))
    assert predicted.count("%") == 3
    (row,) = (line for line in text.splitlines() if line.startswith("| conv4 | tucker"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == ["float32", "multiples of 8", "0.95"]
    assert float(cells[5]) > 0
    assert float(cells[8].removesuffix("x fewer")) >= 1
    assert [line for line in text.splitlines() if line.startswith("| conv4 | dense | int8 |")]
    assert row in capsys.readouterr().out


def test_a_budget_out_of_reach_is_said_in_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_latency.main([*QUICK, "--latency", "0.001"])
    assert "budget.latency=0.001 cannot be reached" in capsys.readouterr().out


def test_large_images_are_the_small_ones_enlarged() -> None:
    small = Images(torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4), torch.tensor([0, 1]))
    large = bench_latency.enlarged(small)
    assert large.x.shape == (2, 3, 224, 224)
    assert large.x.dtype == torch.uint8
    assert torch.equal(large.y, small.y)
    assert large.x[0, 0, 0, 0] == small.x[0, 0, 0, 0]
