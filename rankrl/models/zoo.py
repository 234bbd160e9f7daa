"""Define the built-in classifiers: Conv-4, LeNet-5, CIFAR ResNets and ResNet-9."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rankrl.errors import ConfigError, ModelError
from rankrl.models.classifiers import register_model


class Conv4(nn.Module):
    """conv, conv, pool, conv, conv, pool, flatten, dropout 0.5, dense, dense, with ReLU between.

    The widths 64, 64, 128, 128 are those of Conv-4 in Frankle & Carbin 2019, figure 2.

    Args:
        input_shape: (channels, height, width); at least 4 pixels high and wide.
        num_classes: Number of classes.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 4:
            raise ModelError(f"conv4 needs images of at least 4x4 pixels, got {height}x{width}")
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv4 = nn.Conv2d(128, 128, 3, padding=1)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.relu4, self.relu5 = nn.ReLU(), nn.ReLU()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128 * (height // 4) * (width // 4), 256)
        self.fc2 = nn.Linear(256, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.pool1(self.relu2(self.conv2(self.relu1(self.conv1(input)))))
        x = self.pool2(self.relu4(self.conv4(self.relu3(self.conv3(x)))))
        x = self.dropout(self.flatten(x))
        return self.fc2(self.relu5(self.fc1(x)))


@register_model(
    "conv4", "four 3x3 convolutions, dropout, two dense layers (Frankle & Carbin's Conv-4)", lr=0.05
)
def conv4(input_shape: tuple[int, int, int], num_classes: int) -> Conv4:
    """Build a Conv4 for images of at least 4x4."""
    return Conv4(input_shape, num_classes)


class LeNet5(nn.Module):
    """Two 5x5 convolutions (20 and 50 channels), each with ReLU and 2x2 max pooling, then dense 500.

    431,080 parameters for 1x28x28 images and 10 classes: the baseline of the pruning and tensor-ring papers.
    LeCun et al. 1998 had 6 and 16 channels.

    Args:
        input_shape: (channels, height, width); at least 16 pixels high and wide.
        num_classes: Number of classes.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 16:
            raise ModelError(f"lenet5 needs images of at least 16x16 pixels, got {height}x{width}; try conv4")
        height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(50 * height * width, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.pool1(self.relu1(self.conv1(input)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


@register_model(
    "lenet5", "LeNet-5 (20-50-500), 0.43 M parameters on MNIST; images of 16x16 at least", lr=0.01
)
def lenet5(input_shape: tuple[int, int, int], num_classes: int) -> LeNet5:
    """Build a LeNet-5 for images of at least 16x16."""
    return LeNet5(input_shape, num_classes)


SHORTCUTS = ("A", "B")


class ZeroPadShortcut(nn.Module):
    """Option A: every second row and column, and zero channels before and after. It has no parameters."""

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


def _register_resnet(depth: int, params: str) -> None:
    about = f"CIFAR ResNet-{depth}, {params} M parameters (He et al. 2016)"

    @register_model(f"resnet{depth}", about, lr=0.1)
    def resnet(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
        return CifarResNet((depth - 2) // 6, input_shape[0], num_classes, shortcut)


for _depth, _params in ((20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85")):
    _register_resnet(_depth, _params)


_LEAST_SIDE = 8  # ResNet-9 halves its images three times
_SCALE_OF_SCORES = 0.125


class _Block(nn.Module):
    """Two 3x3 convolutions of equal width, each with batch norm and ReLU, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, channels)
        self.conv2 = _convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class ResNet9(nn.Module):
    """Four 3x3 convolutions, pooling after the last three, a block after the second and the fourth.

    The network of Page, "How to train your ResNet" (2018, part 4), which won the DAWNBench of CIFAR-10, with
    its layers in the order convolution, batch norm, ReLU, pooling, block. Class scores are an eighth of the
    last layer's outputs: its inputs are maxima, so that without the factor its steps are too long at the rate
    that suits the convolutions (three epochs of 12,000 images: 49.8 instead of 70.2 % on other images).

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
