"""The benchmark of others' networks: one row for the original, its int8 version and every way asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_onnx as bench
import onnx
import pytest
from small_graphs import convolutions, images

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mixed_only", [False, True])
def test_every_way_has_a_row(mixed_only: bool, tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    chosen = argparse.Namespace(
        folder=tmp_path,
        runs=2,
        precisions=["float32", "int8_weights"],
        mixed_only=mixed_only,
        budgets=[0.2, 0.001],
        selectors=["greedy", "random"],
        episodes=3,
        measure="bytes",
        decomposition=["tucker"],
        candidates=4,
        cache=None,
    )
    case = bench.Case(images(60), images(20), lambda output: float(output.argmax(1).mean()), 2)
    rows = [line for line in bench.table("net", case, chosen, tmp_path) if line.startswith("|")][1:]
    labels = [row.split("|")[1].strip() for row in rows]
    assert labels[:2] == ["original", "int8 by onnxruntime"]
    assert labels[2:] == [
        f"bytes={budget}, {precisions}{selector}"
        for precisions in ("float32", "float32 and int8_weights")[mixed_only:]
        for budget in (0.2, 0.001)
        for selector in ("", ", random")
    ]
    assert all(
        "cannot be reached" in row for row, label in zip(rows, labels, strict=True) if "0.001" in label
    )
    assert all(row.count("|") == 6 for row in rows)
