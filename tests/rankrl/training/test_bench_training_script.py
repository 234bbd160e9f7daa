"""The benchmark of the training loop measures both sides on the same work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rankrl.data import load_dataset
from rankrl.device import inference_precision
from rankrl.training import TrainingRecipe

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_training.py"


def test_both_sides_have_a_speed() -> None:
    spec = importlib.util.spec_from_file_location("bench_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    data = load_dataset("digits", train_images=64)
    recipe = TrainingRecipe(epochs=1, batch_size=32)
    for measure in (bench.loop_speed, bench.bare_speed):
        assert measure("resnet20", data, recipe, inference_precision()) > 0
