"""ResNet-9: few, wide layers, made to train in minutes."""

from __future__ import annotations

from torch import Tensor, nn

from rankrl.errors import ModelError
from rankrl.models.registry import register_model

_LEAST_SIDE = 8
_SCALE_OF_SCORES = 0.125


class _Block(nn.Module):
    """Two 3x3 convolutions of as many channels, each with batch norm and ReLU, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, channels)
        self.conv2 = _convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class ResNet9(nn.Module):
    """Four 3x3 convolutions, pooling behind the last three, a block behind the second and the fourth.

    The network of Page, "How to train your ResNet" (2018, part 4), which won the DAWNBench of CIFAR-10, with
    its layers in the order convolution, batch norm, ReLU, pooling, block. Class scores are an eighth of what
    the last layer gives: its inputs are maxima, so that without the factor its steps are too long at the rate
    that suits the convolutions (three epochs of 12,000 images: 49.8 instead of 70.2 % on others).

    Args:
        input_shape: (channels, height, width); height and width multiples of 8.
        num_classes: Number of classes.
        width: Channels of the first convolution; the others have 2, 4 and 8 times as many.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, width: int = 64) -> None:
        super().__init__()
        channels, height, width_of_image = input_shape
        if height % _LEAST_SIDE or width_of_image % _LEAST_SIDE or min(height, width_of_image) < _LEAST_SIDE:
            raise ModelError(
                f"resnet9 halves its images three times and needs sides that are multiples of {_LEAST_SIDE}, "
                f"got {height}x{width_of_image}"
            )
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ModelError(f"resnet9 needs a width of at least 1 channel, got {width!r}")
        self.prepare = _convolution(channels, width)
        self.layer1 = nn.Sequential(_convolution(width, 2 * width), nn.MaxPool2d(2), _Block(2 * width))
        self.layer2 = nn.Sequential(_convolution(2 * width, 4 * width), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(_convolution(4 * width, 8 * width), nn.MaxPool2d(2), _Block(8 * width))
        self.pool = nn.MaxPool2d((height // _LEAST_SIDE, width_of_image // _LEAST_SIDE))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.layer3(self.layer2(self.layer1(self.prepare(input))))
        return self.fc(self.pool(x).flatten(1)) * _SCALE_OF_SCORES


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@register_model(
    "resnet9", "eight wide 3x3 convolutions, trained in minutes (Page 2018); option width", lr=0.1
)
def resnet9(input_shape: tuple[int, int, int], num_classes: int, *, width: int = 64) -> ResNet9:
    """Build a ResNet-9 for images whose sides are multiples of 8."""
    return ResNet9(input_shape, num_classes, width)
