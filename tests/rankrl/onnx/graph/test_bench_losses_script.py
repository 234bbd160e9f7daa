"""The table of predicted and measured losses has a row for each kind of plan, and a line for each plan."""

from __future__ import annotations

import csv
from pathlib import Path

import bench_losses as bench
import numpy as np
import onnx
import pytest
from small_graphs import convolutions, images

pytestmark = pytest.mark.slow


def test_every_kind_of_plan_is_predicted_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    np.save(tmp_path / "inputs.npy", images(60))
    files = [str(tmp_path / "net.onnx"), str(tmp_path / "inputs.npy"), "--rows", str(tmp_path / "rows.csv")]
    bench.main([*files, "--plans", "4", "--candidates", "3"])
    with (tmp_path / "rows.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["kind"] for row in rows] == [kind for kind in bench.KINDS for _ in range(4)]
    assert all(float(row["loss"]) >= 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:6]] == [
        *(f"{kind} (4)" for kind in bench.KINDS),
        "all (12)",
    ]
    assert "of processor time" in lines[-1]
