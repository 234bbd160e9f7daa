"""A dataset and a network that train in a fraction of a second."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rankrl.data import ImageData, load_dataset
from rankrl.device import Precision
from rankrl.training import TrainingRecipe, train


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return load_dataset("digits")


class SmallNet(nn.Module):
    """Convolution, batch normalisation, dropout, dense: one of each kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 8, 8) to (N, 10)."""
        x = torch.relu(self.bn(self.conv(x)))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return self.linear(self.dropout(x))


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return SmallNet()


@pytest.fixture
def make_network() -> Callable[[int], nn.Module]:
    return small_net


@pytest.fixture(scope="session")
def trained_once(digits: ImageData) -> nn.Module:
    """`trained`, which is a copy of it."""
    model = small_net()
    recipe = TrainingRecipe(epochs=6, lr=1e-2, batch_size=64)
    train(model, digits, recipe, precision=Precision(torch.device("cpu"), torch.float32))
    return model


@pytest.fixture
def trained(trained_once: nn.Module) -> nn.Module:
    """A network that has learned the digits."""
    return copy.deepcopy(trained_once)
