"""Labelled images in memory, and the type that keeps test images out of every choice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rankrl.data.augmentation import Augmentation
from rankrl.data.preprocessing import Preprocessing
from rankrl.errors import DataError


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, kept as bytes.

    Shapes: x (N, C, H, W), y (N,).
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim != 4:
            raise DataError(
                "images must be a uint8 tensor of shape (N, C, H, W), "
                f"got {self.x.dtype} {tuple(self.x.shape)}"
            )
        if self.y.dtype != torch.int64 or self.y.ndim != 1:
            raise DataError(
                f"labels must be an int64 tensor of shape (N,), got {self.y.dtype} {tuple(self.y.shape)}"
            )
        if len(self.x) != len(self.y):
            raise DataError(f"there are {len(self.x)} images but {len(self.y)} labels; they must be as many")
        if len(self.y) and int(self.y.min()) < 0:
            raise DataError(f"labels are class indices from 0 on, got {int(self.y.min())}")

    def __len__(self) -> int:
        return len(self.y)

    def subset(self, indices: Tensor) -> Images:
        """Return copies of the images at `indices`, an int64 tensor of shape (M,)."""
        return Images(self.x[indices], self.y[indices])

    def first(self, count: int) -> Images:
        """Return copies of the first `count` images, or of all if there are fewer."""
        return self.subset(torch.arange(min(count, len(self))))

    def digest(self) -> str:
        """Return a hash of the images and labels, whatever their order in memory."""
        hasher = hashlib.sha256(self.x.cpu().contiguous().numpy().tobytes())
        hasher.update(self.y.cpu().numpy().tobytes())
        return hasher.hexdigest()[:16]

    def to(self, device: torch.device) -> Images:
        """Return the same images on `device`."""
        return Images(self.x.to(device), self.y.to(device))


class TestImages:
    """The images of the test set. They choose nothing: only a final report may read them.

    This is deliberately no `Images` and has no `x`: a search, an early stop or any other selection that is
    handed test images by mistake fails in the type checker and at run time.
    """

    __test__ = False  # keeps pytest from collecting the class for its name

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def for_report(self) -> Images:
        """Return the images, for a number that is reported and decides nothing."""
        return self._images


@dataclass(frozen=True, eq=False)
class ImageData:
    """A dataset, split and ready for training."""

    name: str
    train: Images
    heldout: Images
    test: TestImages
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation
    class_names: tuple[str, ...] | None = None
    resize: int | None = None
    colours: str | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        _, channels, height, width = self.train.x.shape
        return channels, height, width

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of images for a network that is trained on this dataset."""
        channels, height, width = self.input_shape
        return Preprocessing(
            channels=channels,
            height=height,
            width=width,
            mean=self.mean,
            std=self.std,
            resize=self.resize,
            colours=self.colours,
            class_names=self.class_names,
        )
