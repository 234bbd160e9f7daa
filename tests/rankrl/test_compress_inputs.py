"""What `rankrl.compress` and `rankrl.search` make of the data that they are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import nn
from torchvision import tv_tensors

import decomposition
import rankrl

IMAGES = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK: dict[str, Any] = {
    "timing": rankrl.LatencyOptions(batch=4, runs=2),
    "candidates": 4,
    "progress": False,
}


class Centre(nn.Module):
    """Normalises images, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_place:
            return (x - 0.5) / 2
        x -= 0.5
        x /= 2
        return x


def classifier(*first: nn.Module) -> nn.Sequential:
    """A network of four classes."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU()
    return nn.Sequential(
        *first, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4, bias=False)
    ).eval()


def test_network_that_changes_its_inputs_is_compressed_like_one_that_does_not(tmp_path: Path) -> None:
    found = []
    for in_place, kind in ((False, torch.clone), (True, tv_tensors.Image)):
        given = kind(IMAGES.clone())
        result = rankrl.compress(
            classifier(Centre(in_place=in_place)),
            given,
            tmp_path / f"{in_place}{kind.__name__}",
            params=0.6,
            finetune=rankrl.TrainingRecipe(epochs=1, batch_size=16),
            test=given,
            **QUICK,
        )
        assert torch.equal(given, IMAGES)
        assert result.verified < 1e-4
        found.append(result)
    before, after = found
    assert [layer.operations for layer in after.plan] == [layer.operations for layer in before.plan]
    assert after.epochs[0].loss == pytest.approx(before.epochs[0].loss, rel=1e-4)
    assert after.score == pytest.approx(before.score)
    assert after.test == pytest.approx(before.test)


def test_search_leaves_its_inputs_as_they_were() -> None:
    given = nn.Parameter(IMAGES.clone())
    found = rankrl.search(
        classifier(Centre(in_place=True)),
        score=lambda network: 0.5,
        calibration=given,
        decomposition="tucker",
        params=0.6,
        selector="random",
        episodes=2,
        finalists=2,
        candidates=4,
    )
    assert found.plan.chosen(decomposition.Factorise)
    assert torch.equal(given, IMAGES)


class Detections(NamedTuple):
    boxes: torch.Tensor
    logits: torch.Tensor
    size: tuple[int, ...]


class Detector(nn.Module):
    """Returns several tensors by name, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.boxes, self.logits = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 3), nn.Conv2d(24, 2, 3)

    def forward(self, images: torch.Tensor) -> Detections:
        features = torch.relu(self.body(images))
        return Detections(self.boxes(features), self.logits(features), tuple(images.shape[2:]))


def test_outputs_are_compared_and_exported_by_the_names_that_the_network_gives_them(tmp_path: Path) -> None:
    result = rankrl.compress(Detector(), IMAGES, tmp_path, params=0.6, finetune=1, **QUICK)
    names = [each.name for each in onnx.load(result.path).graph.output]
    assert names == [each.name for each in result.outputs] == ["boxes", "logits"]
    held = IMAGES[torch.randperm(60, generator=torch.Generator().manual_seed(0))[:12].sort().values]
    with torch.no_grad():
        expected, found = Detector()(held), result.model(held)
    for output, before, after in zip(result.outputs, expected, found, strict=False):
        assert output.error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    assert result.score == pytest.approx(1 - sum(each.error for each in result.outputs) / 2, rel=1e-3)
    assert list(json.loads((tmp_path / "metrics.json").read_text())["outputs"]) == names
