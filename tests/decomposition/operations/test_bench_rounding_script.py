"""The table of what rounding's parts are worth has a row for every part, and goes on after a kill."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import bench_rounding as bench
import pytest
import torch
from torch import nn

from rankrl.data import load_dataset

pytestmark = pytest.mark.slow


def test_every_part_is_left_out_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, data.classes)).eval()
    loaded = []

    def load(checkpoint: Path) -> nn.Module:
        loaded.append(checkpoint)
        return model

    monkeypatch.setattr(bench, "load_network", load)
    monkeypatch.setattr(bench, "load_dataset", lambda name: data)
    monkeypatch.setattr(
        bench, "SETTINGS", tuple(bench.replace(each, fraction=0.6) for each in bench.SETTINGS)
    )
    rows, page = tmp_path / "rows.csv", tmp_path / "page.md"
    arguments = ["script", "--checkpoint", "cifar10-small.th", "--rows", str(rows), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--calibration", "32", "--output", str(page)])
    bench.main()
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert [(row["setting"], row["without"]) for row in found] == [
        (setting.name, variant) for setting in bench.SETTINGS for variant in setting.variants
    ]
    assert all(0 <= float(row["accuracy"]) <= 100 for row in found)
    assert all(f"| {row['setting']} | {row['without']} |" in page.read_text() for row in found)
    bench.main()
    with rows.open() as file:
        assert list(csv.DictReader(file)) == found


def test_what_a_variant_leaves_out_is_there_again_afterwards() -> None:
    for variant, (owners, name, instead) in bench.PARTS.items():
        before = [getattr(owner, name) for owner in owners]
        with bench.without(variant):
            assert all(getattr(owner, name) is instead for owner in owners)
        assert [getattr(owner, name) for owner in owners] == before
