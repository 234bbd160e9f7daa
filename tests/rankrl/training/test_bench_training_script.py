"""The benchmark of the training loop measures both sides on the same work."""

import bench_training as bench
import pytest

from rankrl.data import load_dataset
from rankrl.device import inference_precision
from rankrl.training import TrainingRecipe

pytestmark = pytest.mark.slow


def test_both_sides_have_a_speed() -> None:
    data = load_dataset("digits", train_images=64)
    recipe, precision = TrainingRecipe(epochs=1, batch_size=32), inference_precision()
    for measure in (bench.loop_speed, bench.bare_speed):
        assert measure("resnet20", data, recipe, precision) > 0
