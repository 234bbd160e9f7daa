"""Channels or blocks, ranks and precisions in one search, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUICK, read_json, small_network, task_refusal

from decomposition import CompressionPlan
from rankrl.operations import RemoveBlock, kept_channels, removed_blocks

Command = Callable[..., None]


def test_channels_leave_the_network_within_one_search(rankrl: Command, tmp_path: Path) -> None:
    rankrl(
        *QUICK,
        *small_network(tmp_path),
        *(
            "decomposition=spatial_svd",
            "decomposition.candidates=1",
            "decomposition.channels=[0.75,0.5,0.25]",
        ),
        *("budget.bytes=0.12", "selector=local", "hydra.run.dir=run"),
    )
    plan = CompressionPlan.load(Path("run/plan.json"))
    kept = kept_channels(plan)
    assert kept
    assert any(operation.kind == "quantise" for layer in plan for operation in layer.operations)
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert metrics["onnx"]["accuracy"] == pytest.approx(metrics["finetuned"]["accuracy"], abs=0.01)
    page = Path("run/report.html").read_text()
    for name, channels in kept.items():
        assert f"{len(channels)} of " in page, name
    candidates = read_json(Path("run/candidates.json"))
    assert any("reads" in each["operations"][0] for site in candidates.values() for each in site[:-1])
    rankrl(*("task=evaluate", *small_network(tmp_path), "weights=run/model.safetensors"))


def test_fractions_out_of_range_are_refused(tmp_path: Path) -> None:
    message = task_refusal(*small_network(tmp_path), "decomposition.channels=[1.5]", "budget.macs=0.5")
    assert "decomposition.channels: 1.5 is outside (0, 1)" in message


@pytest.mark.slow
def test_blocks_leave_the_network_within_one_search(rankrl: Command, tmp_path: Path) -> None:
    options = {*QUICK, "model=resnet20", "dataset=digits", "dataset.train_images=256"}
    rankrl(
        *sorted(options - {"model=conv4"}),
        *("decomposition=spatial_svd", "decomposition.candidates=1", "decomposition.blocks=true"),
        *("budget.macs=0.15", "selector=local", "hydra.run.dir=run"),
    )
    plan = CompressionPlan.load(Path("run/plan.json"))
    blocks = removed_blocks(plan.chosen(RemoveBlock))
    assert blocks
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert f"removed with block {blocks[0]}" in Path("run/report.html").read_text()
