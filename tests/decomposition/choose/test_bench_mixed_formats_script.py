"""The table of mixed formats has a row for every budget and set of formats, and goes on after a kill."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import bench_mixed_formats as bench
import pytest
import torch
from torch import nn

from rankrl.data import load_dataset

pytestmark = pytest.mark.slow


def test_formats_stand_beside_their_mixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, data.classes)).eval()
    fitted = []

    def load(checkpoint: Path, network: str):
        fitted.append(network)
        return model

    monkeypatch.setattr(bench, "load_network", load)
    monkeypatch.setattr(bench, "load_dataset", lambda name: data)
    monkeypatch.setattr(bench, "BUDGETS", {"0.7 params": ("params", 0.7), "0.8 MACs": ("macs", 0.8)})
    rows, page = tmp_path / "rows.csv", tmp_path / "page.md"
    arguments = [
        "script",
        "--checkpoints",
        "cifar10-small.th",
        "--formats",
        "cp",
        "tucker",
        "--rows",
        str(rows),
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--calibration", "32", "--output", str(page)])
    bench.main()
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert [(row["formats"], row["budget"]) for row in found] == [
        (formats, budget) for formats in ("cp", "tucker", "auto") for budget in bench.BUDGETS
    ]
    for row in found:
        measure, fraction = bench.BUDGETS[row["budget"]]
        assert 0 < float(row[measure]) <= fraction
        assert 0 <= float(row["accuracy"]) <= 100
        assert row["formats"] == "auto" or row["layers"].endswith(row["formats"])
    assert page.read_text().count("| small |") == len(found)
    assert fitted == ["small"] * 3
    bench.main()
    assert fitted == ["small"] * 3, "finished rows are not measured again"
