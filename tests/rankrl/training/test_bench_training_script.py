"""The benchmark of the training loop measures all sides on the same work."""

from __future__ import annotations

import bench_training as bench
import pytest
import torch

from rankrl.data import batches, load_dataset
from rankrl.device import inference_precision
from rankrl.training import TrainingRecipe

pytestmark = pytest.mark.slow


def test_all_sides_have_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LOADER_WORKERS", 0)
    data = load_dataset("digits", train_images=64)
    recipe, precision = TrainingRecipe(epochs=1, batch_size=32), inference_precision()
    for measure in (bench.loop_speed, bench.bare_speed):
        assert measure("resnet20", data, recipe, precision) > 0
    assert bench.plain_speed("resnet20", data, recipe, precision.device) > 0


def test_factorised_layers_are_trained_both_ways() -> None:
    data = load_dataset("digits", train_images=64)
    recipe, precision = TrainingRecipe(epochs=1, batch_size=32), inference_precision()
    for tensor_format, rank, most in (("cp", 2, False), ("tensor_ring", 2, True)):
        contracted, layers, staged, trained = bench.factorised_speeds(
            "resnet20", data, recipe, precision, tensor_format, rank
        )
        assert (contracted > layers / 2) == most
        assert min(staged, trained) > 0


def test_the_plain_loop_sees_the_same_images_normalised_alike() -> None:
    data = load_dataset("digits", train_images=64)
    images = bench._Transformed(data)
    assert len(images) == len(data.train)
    x, y = images[3]
    (expected, _), *_ = batches(data.train.first(4), 4, mean=data.mean, std=data.std)
    assert x.shape == expected[3].shape
    assert int(y) == int(data.train.y[3])
    # Cropped and flipped: of the same values, and of zeros around them, normalised.
    border = -torch.tensor(data.mean) / torch.tensor(data.std)
    known = torch.cat([expected[3].flatten(), border])
    assert bool((x.flatten()[:, None] - known).abs().amin(1).lt(1e-5).all())
