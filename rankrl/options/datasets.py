"""Options of the datasets that can be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DatasetOptions:
    """What every dataset has, whatever its own options (`rankrl.data.load_dataset`)."""

    heldout: int | None = None
    train_images: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    padding: int | None = None
    flip: bool | None = None


@dataclass(frozen=True, kw_only=True)
class NpzOptions(DatasetOptions):
    """Options of `npz`."""

    path: str | Path
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ImageFolderOptions(DatasetOptions):
    """Options of `imagefolder`."""

    path: str | Path
    size: int = 224
    resize: int | None = None


@dataclass(frozen=True, kw_only=True)
class InputsOptions(DatasetOptions):
    """Options of `inputs`."""

    path: str | Path
    size: int | None = None
    resize: int | None = None
    scale: float = 1.0
    order: str = "rgb"
    batch_axes: Mapping[str, int | None] | None = None


DATASETS: dict[str, type] = {
    "cifar10": DatasetOptions,
    "cifar100": DatasetOptions,
    "digits": DatasetOptions,
    "imagefolder": ImageFolderOptions,
    "inputs": InputsOptions,
    "mnist": DatasetOptions,
    "npz": NpzOptions,
}
"""Options by the dataset's name."""
