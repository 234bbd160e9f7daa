"""Ordinary networks as people have them: wrapped, in other types, keeping things on themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models

from rankrl.models import create_model


def small() -> nn.Module:
    """Return a ResNet-20 for 10 classes."""
    network: nn.Module = create_model("resnet20", input_shape=(3, 32, 32), num_classes=10)
    return network


class Star(nn.Module):
    """Hands on whatever it is called with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return what the network inside returns."""
        outputs: torch.Tensor = self.inner(*inputs)
        return outputs


class KeepsFeatures(Star):
    """Keeps the features of its last pass in a list, and in a dict that a hook fills."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.features: list[torch.Tensor] = []
        self.seen: dict[str, torch.Tensor] = {}
        inner.register_forward_hook(lambda module, inputs, output: self.seen.update(last=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return class scores (N, 10)."""
        outputs: torch.Tensor = self.inner(x)
        self.features = [outputs]
        return outputs


class Normalising(Star):
    """Normalises the images that it is given in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return class scores (N, 10) of images (N, 3, 32, 32)."""
        outputs: torch.Tensor = self.inner(x.sub_(0.1).div_(1.2))
        return outputs


class Detailed(Star):
    """Returns a size, a name and None besides its scores."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        """Return class scores (N, 10) and more."""
        return {"scores": self.inner(x), "size": x.shape[-2:], "name": "net", "mask": None}


class UNet(nn.Module):
    """Two levels, skip connections by concatenation, transposed convolutions on the way up."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.down = _block(3, width), _block(width, 2 * width, stride=2)
        self.bottom = _block(2 * width, 4 * width, stride=2)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle = _block(4 * width, 2 * width)
        self.last_up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last, self.head = _block(2 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map (N, 2, H, W) of images (N, 3, H, W)."""
        first = self.first(x)
        down = self.down(first)
        middle = self.middle(torch.cat([self.up(self.bottom(down)), down], 1))
        outputs: torch.Tensor = self.head(self.last(torch.cat([self.last_up(middle), first], 1)))
        return outputs


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU()
    return nn.Sequential(*layers)


def weight_normed() -> nn.Module:
    """Return convolutions under the old `torch.nn.utils.weight_norm`, after a pass with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = [
            nn.utils.weight_norm(nn.Conv2d(n, m, 3, padding=1)) for n, m in ((3, 32), (32, 48), (48, 32))
        ]
    layers = [each for conv in normed for each in (conv, nn.ReLU())]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    network(torch.zeros(1, 3, 32, 32))
    return network


def frozen() -> nn.Module:
    """Return a ResNet-20 whose first stage is frozen and whose last has a hook."""
    network = small()
    network.get_submodule("layer1").requires_grad_(False)
    network.get_submodule("layer3.0.conv1").register_forward_pre_hook(lambda module, inputs: None)
    return network


ODD: dict[str, Callable[[], nn.Module]] = {
    "float16": lambda: small().half(),
    "bfloat16": lambda: small().bfloat16(),
    "float64": lambda: small().double(),
    "data_parallel": lambda: nn.DataParallel(small()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(small()),
    "compiled": lambda: torch.compile(small(), backend="eager"),  # type: ignore[return-value,dict-item]
    "star_arguments": lambda: Star(small()),
    "keeps_features": lambda: KeepsFeatures(small()),
    "normalises_in_place": lambda: Normalising(small()),
    "more_than_tensors": lambda: Detailed(small()),
    "unet": UNet,
    "weight_norm": weight_normed,
    "frozen": frozen,
    "segmentation": lambda: models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None
    ),
}
"""Networks by their names; all take images of 32x32 pixels or more."""
