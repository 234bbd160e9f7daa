"""Training any network on tensors in memory."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankrl.errors import NonFiniteError
from rankrl.files import write_json
from rankrl.training import TrainingRecipe, train_on
from rankrl.training.loop import imitation_loss, quantity_weights, steps_of_an_epoch

RECIPE = TrainingRecipe(epochs=1, batch_size=8, lr=1e-3, restore_best=False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def inputs(count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [7, 8, 9, 16, 17, 18])
def test_no_batch_is_of_one_input(count: int) -> None:
    labels = torch.arange(count) % 3
    seen: list[int] = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(len(labels))
        return nn.functional.cross_entropy(outputs, labels)

    train_on(network(), inputs(count), labels, RECIPE, score=lambda _: 0.5, loss=loss)
    assert len(seen) == steps_of_an_epoch(count, RECIPE.batch_size)
    assert sum(seen) == count - (count % RECIPE.batch_size == 1)
    assert min(seen) > 1


def test_a_batch_size_of_one_leaves_nothing_out() -> None:
    assert steps_of_an_epoch(5, 1) == 5
    assert steps_of_an_epoch(1, 8) == 1


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_labels_may_be_integers_of_any_size(kind: torch.dtype) -> None:
    labels = (torch.arange(16) % 3).to(kind)
    found = train_on(network(), inputs(16), labels, RECIPE, score=lambda _: 0.5)
    assert len(found.history) == 1


@pytest.mark.parametrize("score", [torch.tensor(0.25), np.float32(0.25), 0.25])
def test_a_score_may_be_any_number(score: Any, tmp_path: Any) -> None:
    found = train_on(network(), inputs(16), torch.zeros(16, dtype=torch.long), RECIPE, score=lambda _: score)
    assert found.history[0].accuracy == 0.25
    write_json(tmp_path / "metrics.json", {"accuracy": found.history[0].accuracy})


def test_a_score_that_is_no_finite_number_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="score returned nan"):
        train_on(network(), inputs(16), torch.zeros(16, dtype=torch.long), RECIPE, score=lambda _: math.nan)


def distances(teacher: nn.Module, **options: Any) -> tuple[float, float]:
    """Return how far a network's class scores are from a teacher's, untrained and taught."""
    model, x = network(), inputs(64)

    def distance() -> float:
        with torch.no_grad():
            return float((model(x).softmax(1) - teacher(x).softmax(1)).square().mean())

    model.eval()
    before = distance()
    recipe = TrainingRecipe(epochs=20, batch_size=16, lr=1e-2, distillation=0.9, restore_best=False)
    train_on(model, x, recipe=recipe, score=lambda _: 0.5, teacher=teacher, **options)
    return before, distance()


@pytest.mark.parametrize("loss", [None, nn.functional.cross_entropy])
def test_with_labels_a_network_learns_from_a_teacher_too(loss: Any) -> None:
    torch.manual_seed(5)
    teacher = nn.Linear(4, 3).eval()
    labels = teacher(inputs(64)).argmax(1)
    before, after = distances(teacher, labels=labels, loss=loss)
    assert after < before / 4


def test_a_share_of_none_leaves_the_teacher_out() -> None:
    class RefusesError(Exception):
        pass

    class Refusing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RefusesError

    labels = torch.arange(16) % 3
    train_on(network(), inputs(16), labels, RECIPE, score=lambda _: 0.5, teacher=Refusing())
    taught = dataclasses.replace(RECIPE, distillation=0.5)
    with pytest.raises(RefusesError):
        train_on(network(), inputs(16), labels, taught, score=lambda _: 0.5, teacher=Refusing())


def test_a_quantity_of_small_numbers_is_imitated_too() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 12, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).sigmoid().flatten(2)
            return torch.cat([640 * y[:, :4], y[:, 4:]], 1)  # boxes in pixels, scores of classes

    torch.manual_seed(0)
    network, inputs = Detector(), torch.randn(64, 3, 4, 4)
    with torch.no_grad():
        taught = network(inputs)
    guessed = taught.clone()
    guessed[:, 4:] = taught[:, 4:].mean(0)
    assert imitation_loss(guessed, taught) < 1e-5
    weights = quantity_weights(network, inputs)
    assert imitation_loss(guessed, taught, weights).item() == pytest.approx(
        0.5, rel=0.1
    )  # half of it is lost
    assert quantity_weights(nn.Linear(3, 40), torch.randn(64, 3)) == [None]
