"""Networks that no one here wrote, from the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUICK, read_json, task_refusal
from torch import nn

from rankrl.models import create_model
from rankrl.training.networks import model_title

NETWORKS = """
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class Viewing(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.fc1 = nn.Linear(8 * width, 64)
        self.fc2 = nn.Linear(64, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.view(-1, self.fc1.in_features))))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def branching(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), Branch(), nn.Flatten(), nn.Linear(288, num_classes))


def deep():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for name in ("a_rather_long_name", "another_rather_long_name", "and_one_more_of_them"):
        network = nn.Sequential(OrderedDict([(name, network)]))
    return network


def failing(width):
    raise KeyError("a defect of the user's")
"""


@pytest.fixture(autouse=True)
def _my_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # as the command line does
    (tmp_path / "networks_of_mine.py").write_text(NETWORKS)


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"architecture": "resnet20"}, "resnet20"),
        ({"architecture": "torchvision", "name": "resnet18"}, "resnet18"),
        ({"_target_": "timm.create_model", "model_name": "resnet10t"}, "resnet10t (timm.create_model)"),
        (
            {"_target_": "torchvision.models.get_model", "name": "vgg11"},
            "vgg11 (torchvision.models.get_model)",
        ),
        ({"_target_": "mine.build", "width": 3}, "LeNet5 (mine.build)"),
        ({"_target_": "mine.LeNet5", "name": None}, "mine.LeNet5"),
    ],
)
def test_a_network_is_called_by_its_name(options: dict[str, object], title: str) -> None:
    network = create_model("lenet5", input_shape=(1, 28, 28), num_classes=10)
    assert model_title({"architecture": "custom", "checkpoint": None, **options}, network) == title


def test_a_class_of_torch_names_nothing() -> None:
    assert model_title({"_target_": "mine.build"}, nn.Sequential()) == "mine.build"


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", ["tensor_ring", pytest.param("cp", marks=pytest.mark.slow)])
def test_network_that_needs_contiguous_maps_goes_through_the_pipeline(
    rankrl: Callable[..., None], tmp_path: Path, name: str
) -> None:
    own = ("model=custom", "model._target_=networks_of_mine.Viewing", "+model.width=12")
    options = (f"decomposition={name}", "budget.params=0.5", "export.int8=false")
    rankrl(*own, *QUICK[1:], *options, f"hydra.run.dir={tmp_path}/run")
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert metrics["model"] == "networks_of_mine.Viewing"
    assert metrics["compressed"]["params"] <= 0.5 * metrics["baseline"]["params"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4


def test_network_that_cannot_be_exported_is_refused_before_the_search(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    message = refused("model=custom", "model._target_=networks_of_mine.branching", *QUICK[1:])
    assert "layer '1' (Branch) cannot be traced" in message
    assert list(tmp_path.rglob("dense.safetensors"))
    assert not list(tmp_path.rglob("episodes.csv"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("model._target_=networks_of_mine.failing", "+model.width=3"), "called with (width=3)"),
        (("model._target_=networks_of_mine.Viewing", "+model.num_classes=7"), "the dataset has 10 classes"),
        (("model._target_=networks_of_mine.Branch",), "returns a torch.float32 tensor of shape (2, 1, 8, 8)"),
    ],
)
def test_own_network_that_cannot_be_built_is_refused(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in task_refusal("model=custom", *arguments, "task=inspect")


def test_own_network_needs_a_name(refused: Callable[..., str]) -> None:
    assert "model._target_" in refused("model=custom", "task=inspect")


def test_names_of_layers_are_shown_whole(
    rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    rankrl("model=custom", "model._target_=networks_of_mine.deep", "task=inspect", *QUICK[1:])
    assert "and_one_more_of_them.another_rather_long_name.a_rather_long_name.1" in capsys.readouterr().out
