"""The table of a file beside PyTorch has every row, fitted to as many images, and goes on after a kill."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import bench_onnx_torch as bench
import pytest
import torch
from torch import nn

from rankrl.data import load_dataset

pytestmark = pytest.mark.slow


def test_both_ways_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, data.classes)).eval()
    monkeypatch.setattr(bench, "load_network", lambda checkpoint: model)
    monkeypatch.setattr(bench, "load_dataset", lambda name: data)
    rows, page = tmp_path / "rows.csv", tmp_path / "page.md"
    arguments = ["script", "--checkpoint", "small.th", "--rows", str(rows), "--seeds", "1", "--kept", "0.5"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--calibration", "40", "--output", str(page)])
    bench.main()
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert [(row["network"], row["outputs weighed"]) for row in found] == [
        (bench.TORCH, "True"),
        (bench.FILE, "True"),
        (bench.TORCH, "False"),
        (bench.FILE, "False"),
    ]
    whole = sum(each.numel() for each in model.parameters())
    assert all(float(row["parameters"]) <= 0.5 * whole for row in found)
    assert all(5 < float(row["accuracy"]) < 40 for row in found)  # untrained
    text = page.read_text(encoding="utf-8")
    assert text.count(f"| {bench.FILE} |") == 2
    bench.main()
    with rows.open() as file:
        assert list(csv.DictReader(file)) == found
