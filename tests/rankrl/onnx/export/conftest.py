"""Networks that the export tests write to ONNX, all with batch-norm statistics that are not trivial."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankrl.onnx.export import ExportResult, export_onnx


class ResidualBlock(nn.Module):
    """The basic block of the CIFAR ResNets with their parameter-free shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride, self.padding = stride, (channels_out - channels_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


class ContractedConv2d(nn.Module):
    """A convolution whose weight is contracted from the three cores of a ring."""

    def __init__(self, channels_in: int, channels_out: int, rank: int) -> None:
        super().__init__()
        self.core_out = nn.Parameter(torch.randn(rank, channels_out, rank) / rank)
        self.core_in = nn.Parameter(torch.randn(rank, channels_in, rank) / rank)
        self.core_kernel = nn.Parameter(torch.randn(rank, 9, rank) / rank)
        self.weight_shape = (channels_out, channels_in, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.einsum("aob,bic,cka->oik", self.core_out, self.core_in, self.core_kernel)
        return F.conv2d(x, weight.reshape(self.weight_shape), padding=1)


def _plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def _residual() -> nn.Module:
    return nn.Sequential(ResidualBlock(3, 9, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 5))


def _contracted() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        ContractedConv2d(32, 48, 3),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


def _factorised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1, bias=False),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.Conv2d(6, 16, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 5)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": _plain,
    "residual": _residual,
    "contracted": _contracted,
    "factorised": _factorised,
}


def randomise_batchnorm(model: nn.Module) -> nn.Module:
    """Give every batch normalisation statistics and weights that change what it computes."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
    return model


def make_network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomise_batchnorm(NETWORKS[name]())


Exported = tuple[nn.Module, ExportResult]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Return one of the small networks by name, in training mode, and its file, for all tests to read."""

    @cache
    def export(name: str) -> Exported:
        model = make_network(name).train()
        return model, export_onnx(model, tmp_path_factory.mktemp(name) / "model.onnx", (3, 8, 8))

    return export


@pytest.fixture(params=sorted(NETWORKS))
def exported(request: pytest.FixtureRequest, written: Callable[[str], Exported]) -> Exported:
    """Each of the small networks in turn (3x8x8 inputs, 5 classes), in training mode, and its ONNX file."""
    return written(request.param)


@pytest.fixture(scope="session")
def plain_file(written: Callable[[str], Exported]) -> Path:
    """The ONNX file of the plain network, for all tests to read."""
    return written("plain")[1].path


@pytest.fixture(scope="session")
def fixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX file of the plain network for batches of 4, for all tests to read."""
    path, sample = tmp_path_factory.mktemp("fixed") / "model.onnx", torch.zeros(4, 3, 8, 8)
    return export_onnx(make_network("plain"), path, (3, 8, 8), dynamic_batch=False, sample=sample).path


@pytest.fixture(scope="session")
def make() -> Callable[[str], nn.Module]:
    return make_network
