"""Conv4: a small VGG with dropout and two dense layers."""

from __future__ import annotations

from torch import Tensor, nn

from rankrl.errors import ModelError
from rankrl.models.registry import register_model


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
