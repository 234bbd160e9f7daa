"""`rankrl.compress(..., teacher=)`: another network than the dense one to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from call_options import grouped
from torch import nn

import rankrl
from rankrl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("staged_files", "no_report")

IMAGES = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CLASSES = (IMAGES.mean((1, 2, 3)) > 0).long()
PAIRS = list(zip(IMAGES.split(20), CLASSES.split(20), strict=True))
QUICK: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=4, runs=2), "candidates": 4, "progress": False}


def network(classes: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    last = nn.Linear(12 * 16, classes)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.Flatten(), last)


@pytest.mark.parametrize("data", [PAIRS, IMAGES], ids=["labels", "no labels"])
def test_a_network_is_taught_by_another_with_and_without_labels(data: Any, tmp_path: Path) -> None:
    teacher = network(seed=7).train()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}

    def epochs(name: str, **options: Any) -> float:
        folder = tmp_path / name
        result = rankrl.compress(
            network(), data, folder, params=0.7, finetune=1, **options, **grouped(**QUICK)
        )
        return result.epochs[0].loss

    losses = [epochs("one", teacher=teacher), epochs("two", teacher=[teacher, network(seed=8)])]
    assert len({*losses, epochs("none")}) == 3
    assert teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    metrics = json.loads((tmp_path / "one" / "metrics.json").read_text())
    assert list(metrics["teacher"]) == ["accuracy" if data is PAIRS else "agreement"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"teacher": network(3), "finetune": 1},
            r"returns \[\(2, 3\)\] for two inputs, the network \[\(2, 2\)\]",
        ),
        ({"teacher": nn.Linear(5, 2), "finetune": 1}, "the teacher fails on the network's inputs"),
        ({"teacher": "resnet56", "finetune": 1}, "must be a torch.nn.Module or a list of them, got str"),
        ({"teacher": [], "finetune": 1}, "got nothing"),
        ({"teacher": network()}, "give finetune= a number of epochs or a recipe"),
        ({"teacher": network(), "finetune": lambda model: model}, "let your function learn from it"),
        ({"teacher": network(), "finetune": rankrl.TrainingRecipe(epochs=1)}, "distillation=0.9"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        rankrl.compress(network(), PAIRS, tmp_path, params=0.7, **options, **grouped(**QUICK))
