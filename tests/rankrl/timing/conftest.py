"""A small network's ONNX files, which tests of time run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rankrl.onnx.export import export_onnx

SHAPE = (3, 8, 8)


def _network() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)).eval()


@pytest.fixture(scope="session")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network's file."""
    return export_onnx(_network(), tmp_path_factory.mktemp("plain") / "model.onnx", SHAPE).path


@pytest.fixture(scope="session")
def fixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network's file for batches of 4."""
    path, sample = tmp_path_factory.mktemp("fixed") / "model.onnx", torch.zeros(4, *SHAPE)
    return export_onnx(_network(), path, SHAPE, dynamic_batch=False, sample=sample).path
