"""Small networks of families that rankrl does not come with, for scripts that train them in seconds.

Each takes images (N, C, H, W): `rankrl model=custom model._target_=small_networks.separable` with the folder
of scripts in PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from decomposition import plain_attention

Shape = tuple[int, int, int]


def separable(
    input_shape: Shape, num_classes: int, widths: Sequence[int] = (32, 64, 96, 128)
) -> nn.Sequential:
    """Make depthwise-separable convolutions (MobileNet's blocks), the third with stride 2."""
    layers: list[nn.Module] = [*_normed(nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False))]
    for number, (inside, outside) in enumerate(pairwise(widths)):
        stride = 2 if number == 1 else 1
        depthwise = nn.Conv2d(inside, inside, 3, stride, padding=1, groups=inside, bias=False)
        layers += [*_normed(depthwise), *_normed(nn.Conv2d(inside, outside, 1, bias=False))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def _normed(convolution: nn.Conv2d) -> tuple[nn.Module, ...]:
    return convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()


class Transformer(nn.Module):
    """A vision transformer with patches of 2x2, whose tokens are averaged before the last layer."""

    def __init__(self, input_shape: Shape, num_classes: int, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        channels, height, width_of_image = input_shape
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(height * width_of_image // 4, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        tokens = self.patches(input).flatten(2).transpose(1, 2) + self.positions
        return self.fc(self.layers(tokens).mean(1))


def transformer(input_shape: Shape, num_classes: int, width: int = 48, depth: int = 3) -> nn.Module:
    """Make a `Transformer` whose projections are layers of their own, so that they can be factorised."""
    model: nn.Module = plain_attention(Transformer(input_shape, num_classes, width, depth))
    return model


def one_dimensional(input_shape: Shape, num_classes: int, width: int = 48) -> nn.Sequential:
    """Make 1-D convolutions over the pixels of an image, row after row."""
    layers: list[nn.Module] = [nn.Flatten(2)]
    for inside, outside, stride in (
        (input_shape[0], width, 1),
        (width, width, 2),
        (width, 2 * width, 2),
        (2 * width, 2 * width, 2),
    ):
        convolution = nn.Conv1d(inside, outside, 9, stride, padding=4, bias=False)
        layers += [convolution, nn.BatchNorm1d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(8 * width, num_classes))
