"""LeNet-5 in the form that the compression literature uses (Caffe's 20-50-500)."""

from __future__ import annotations

from torch import Tensor, nn

from rankrl.errors import ModelError
from rankrl.models.registry import register_model


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


@register_model("lenet5", "LeNet-5 (20-50-500), 0.43 M parameters on MNIST", lr=0.01)
def lenet5(input_shape: tuple[int, int, int], num_classes: int) -> LeNet5:
    """Build a LeNet-5 for images of at least 16x16."""
    return LeNet5(input_shape, num_classes)
