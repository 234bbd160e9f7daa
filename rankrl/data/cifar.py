"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32."""

from __future__ import annotations

from pathlib import Path

from rankrl.data.augmentation import Augmentation
from rankrl.data.published import read_published
from rankrl.data.registry import SourceFiles, register_dataset


@register_dataset(
    "cifar10",
    "CIFAR-10: 50,000 + 10,000 colour images of 32x32, 10 classes",
    augmentation=Augmentation(padding=4, flip=True),
    # ImageNet's statistics: the published CIFAR ResNet checkpoints were trained with them.
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
def cifar10(root: Path) -> SourceFiles:
    """Read CIFAR-10 from `root`; see `read_published`."""
    return read_published("cifar10", root, classes=10, torchvision_class="CIFAR10")


@register_dataset(
    "cifar100",
    "CIFAR-100: 50,000 + 10,000 colour images of 32x32, 100 classes",
    augmentation=Augmentation(padding=4, flip=True),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
def cifar100(root: Path) -> SourceFiles:
    """Read CIFAR-100 (fine labels) from `root`; see `read_published`."""
    return read_published("cifar100", root, classes=100, torchvision_class="CIFAR100")
