"""MNIST (LeCun et al. 1998): 60,000 + 10,000 grey digits of 28x28."""

from __future__ import annotations

from pathlib import Path

from rankrl.data.augmentation import Augmentation
from rankrl.data.published import read_published
from rankrl.data.registry import SourceFiles, register_dataset


@register_dataset(
    "mnist",
    "MNIST: 60,000 + 10,000 grey digits of 28x28, 10 classes",
    augmentation=Augmentation(padding=2, flip=False),
    mean=(0.1307,),
    std=(0.3081,),
)
def mnist(root: Path) -> SourceFiles:
    """Read MNIST from `root`; see `read_published`."""
    return read_published("mnist", root, "0123456789", torchvision_class="MNIST")
