"""The table of what integers cost: a row a network, with weights of 8 bits and of 7."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_int8 as bench
import pytest
import torch
from torch import nn

from rankrl.data import ImageData, load_dataset
from rankrl.options.timing import ExportOptions

pytestmark = pytest.mark.slow


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ImageData:
    """The data of the table, and in place of its checkpoints a network that never learned anything."""
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16, data.classes)).eval()
    monkeypatch.setattr(bench, "load_network", lambda checkpoint, name: model)
    monkeypatch.setattr(bench, "load_dataset", lambda name, seed: data)
    return data


def test_both_widths_are_measured_and_written_to_the_page(
    digits: ImageData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    measure = bench.int8_numbers

    def numbers(baseline: Path, data: ImageData, options: ExportOptions, folder: Path) -> Any:
        asked.append(options.reduce_range)
        found = measure(baseline, data, replace(options, batch=8, runs=2), folder)
        assert found is not None
        return {**found, "accuracy": 0.25 if options.reduce_range else 0.5}

    monkeypatch.setattr(bench, "int8_numbers", numbers)
    page = tmp_path / "page.md"
    arguments = ["--networks", "small", "--repeats", "2", "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["bench_int8.py", "--checkpoints", str(tmp_path), *arguments])
    bench.main()
    assert asked == [False, True] * 2
    (line,) = [each for each in page.read_text().splitlines() if each.startswith("| small |")]
    cells = [each.strip() for each in line.strip("|").split("|")]
    assert (cells[2], cells[4]) == ("50.00%", "25.00%")
    assert all(float(cells[column]) > 0 for column in (3, 5, 6))
    assert "--checkpoints CHECKPOINTS" in page.read_text()
