"""The CIFAR ResNets of He et al. 2016, "Deep Residual Learning", section 4.2.

Module names are those of the published checkpoints: conv1, bn1, layer{1,2,3}.{i}.{conv1,bn1,conv2,bn2} and
linear.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rankrl.errors import ConfigError
from rankrl.models.registry import register_model

SHORTCUTS = ("A", "B")


class ZeroPadShortcut(nn.Module):
    """Option A: every second row and column, and zero channels before and after. It has no parameters.

    Args:
        in_channels: Channels that come in.
        out_channels: Channels that go out; the difference is split equally before and after.
        stride: Step between the rows and columns that are kept.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module
        if stride == 1 and in_channels == channels:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = ZeroPadShortcut(in_channels, channels, stride)
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """A stem of 16 channels, three stages of 16, 32 and 64 channels, mean over the map, one dense layer.

    Args:
        blocks: Basic blocks in a stage; the depth is 6 * blocks + 2.
        in_channels: Channels of the images.
        num_classes: Number of classes.
        shortcut: Shortcuts where the shape changes: "A" (subsampled, zero-padded, no parameters) or "B" (1x1
            convolution).
    """

    def __init__(self, blocks: int, in_channels: int, num_classes: int, shortcut: str = "A") -> None:
        super().__init__()
        if shortcut not in SHORTCUTS:
            raise ConfigError(f"model.shortcut must be one of {', '.join(SHORTCUTS)}, got {shortcut!r}")
        self.conv1 = nn.Conv2d(in_channels, 16, 3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1, shortcut)
        self.layer2 = self._stage(16, 32, blocks, 2, shortcut)
        self.layer3 = self._stage(32, 64, blocks, 2, shortcut)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, channels: int, blocks: int, stride: int, shortcut: str) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, shortcut)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, shortcut) for _ in range(blocks - 1)))

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to class scores (N, num_classes)."""
        out = F.relu(self.bn1(self.conv1(input)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


@register_model("resnet20", "CIFAR ResNet-20, 0.27 M parameters (He et al. 2016)", lr=0.1)
def resnet20(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
    """Build a ResNet-20; `shortcut` is "A" or "B"."""
    return CifarResNet(3, input_shape[0], num_classes, shortcut)


@register_model("resnet32", "CIFAR ResNet-32, 0.46 M parameters (He et al. 2016)", lr=0.1)
def resnet32(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
    """Build a ResNet-32; `shortcut` is "A" or "B"."""
    return CifarResNet(5, input_shape[0], num_classes, shortcut)


@register_model("resnet44", "CIFAR ResNet-44, 0.66 M parameters (He et al. 2016)", lr=0.1)
def resnet44(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
    """Build a ResNet-44; `shortcut` is "A" or "B"."""
    return CifarResNet(7, input_shape[0], num_classes, shortcut)


@register_model("resnet56", "CIFAR ResNet-56, 0.85 M parameters (He et al. 2016)", lr=0.1)
def resnet56(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
    """Build a ResNet-56; `shortcut` is "A" or "B"."""
    return CifarResNet(9, input_shape[0], num_classes, shortcut)
