"""The benchmark of runtimes writes a kit of layers, and compares what it measured with runtimes here."""

from __future__ import annotations

import json
from pathlib import Path

import bench_runtimes
import pytest
from torch import nn

pytestmark = pytest.mark.slow


def test_what_is_fastest_of_each_layer_and_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layers = {
        "3x3": (nn.Conv2d(16, 16, 3, padding=1), (16, 8, 8)),
        "depthwise": (nn.Conv2d(16, 16, 3, groups=16), (16, 8, 8)),
    }
    monkeypatch.setattr(bench_runtimes, "LAYERS", layers)
    kit, table = tmp_path / "kit", tmp_path / "times.json"
    monkeypatch.setattr("sys.argv", ["bench_runtimes.py", "--kit", str(kit)])
    bench_runtimes.main()
    content = json.loads((kit / "kit.json").read_text())
    names = [name for group in content["groups"] for name in group["files"]]
    times = {name: {"median_ms": 1.0 + number} for number, name in enumerate(names)}
    machine = {"processor": "a device", "runtime": "r", "version": "1", "threads": 1, "clock": "processor"}
    head = {"version": content["version"], "about": content["about"], "machine": machine}
    table.write_text(json.dumps({**head, "left": 0, "times": times, "failed": {}}))
    command = f"bench_runtimes.py --tables {table} --runtimes onnxruntime --runs 3"
    monkeypatch.setattr("sys.argv", command.split())
    bench_runtimes.main()
    shown = capsys.readouterr().out
    assert "1. r 1, batch 1, threads 1, a device" in shown
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line[:4] in ("| 3x", "| de")]
    assert [row[:2] for row in rows] == [[name, where] for name in layers for where in ("1", "2")]
    assert all(float(each) > 0 for row in rows[:2] for each in row[2:-1])
    assert {row[-1] for row in rows[2:]} <= {"dense", "dense int8"}
