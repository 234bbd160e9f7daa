"""Small networks and random tensors that the decomposition tests share."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from decomposition.formats import Ranks, TensorFormat
from decomposition.network.geometry import WeightModes

RandomWeight = Callable[[TensorFormat, WeightModes, Ranks, int], torch.Tensor]


def _small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


@pytest.fixture
def small_net() -> nn.Module:
    """A plain convolutional network with batch norm, for inputs of shape (3, 10, 10)."""
    return _small_net()


@pytest.fixture(scope="session")
def untouched_small_net() -> nn.Module:
    """The same for all tests, none of which changes it, in evaluation mode."""
    return _small_net().eval()


@pytest.fixture
def random_weight() -> RandomWeight:
    """Make a weight (out, in, kernel), float64, of exactly the given ranks from normal cores."""

    def make(tensor_format: TensorFormat, modes: WeightModes, ranks: Ranks, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shapes = tensor_format.core_shapes(modes, ranks)
        cores = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return tensor_format.reconstruct(cores, modes)

    return make
