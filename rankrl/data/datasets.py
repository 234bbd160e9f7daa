"""Register and load datasets, and split training images by stratified sampling."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decomposition.registry import Registry
from rankrl.data.images import Augmentation, ImageData, Images, TestImages
from rankrl.errors import ConfigError, DataError, counted, did_you_mean


def stratified_split(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `size` indices, from each class in proportion to its frequency; return the rest and the drawn.

    Quotas are rounded by largest remainder, so exactly `size` indices are drawn.

    Shapes: labels (N,).
    """
    if not 0 <= size <= len(labels):
        raise ValueError(f"cannot draw {size} of {len(labels)} images")
    counts = torch.bincount(labels)
    shares = counts.double() * size / max(len(labels), 1)
    quotas = shares.floor().long()
    remainders = torch.argsort(shares - quotas, descending=True, stable=True)
    quotas[remainders[: size - int(quotas.sum())]] += 1

    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    # by_class holds class 0 in random order, then class 1, ...: the first `quota` of each are drawn.
    rank_in_class = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    drawn = rank_in_class < quotas.repeat_interleave(counts)
    return by_class[~drawn].sort().values, by_class[drawn].sort().values


DEFAULT_HELDOUT = 5000
"""Held-out images of a large dataset; a small one holds out a fifth of its training file."""


@dataclass(frozen=True, eq=False)
class SourceFiles:
    """Training and test file of a source, before any split."""

    train: Images
    test: Images
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    resize: int | None = None
    colours: str | None = None


@dataclass(frozen=True)
class DatasetSource:
    name: str
    description: str
    read: Callable[..., SourceFiles]
    augmentation: Augmentation
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def options(self) -> list[str]:
        return [name for name in inspect.signature(self.read).parameters if name != "root"]


_SOURCES: Registry[DatasetSource] = Registry("dataset", ConfigError)


def register_dataset(
    name: str,
    description: str,
    *,
    augmentation: Augmentation,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Callable[[Callable[..., SourceFiles]], Callable[..., SourceFiles]]:
    """Register the decorated function `read(root, **options)` as the dataset `name`."""

    def register(read: Callable[..., SourceFiles]) -> Callable[..., SourceFiles]:
        source = DatasetSource(name, description, read, augmentation, mean, std)
        _SOURCES.add(name, source, description)
        return read

    return register


def list_datasets(pattern: str = "*") -> list[str]:
    """Return the names of the registered datasets that match a wildcard pattern, sorted."""
    return _SOURCES.names(pattern)


def dataset_source(name: str) -> DatasetSource:
    return _SOURCES[name]


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    heldout: int | None = None,
    train_images: int | None = None,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    padding: int | None = None,
    flip: bool | None = None,
    **options: Any,
) -> ImageData:
    """Load a dataset and hold images out of its training file.

    Args:
        name: A registered name, see `list_datasets`.
        root: The folder to look in; None takes the environment variable RANKRL_DATA, or `data`.
        heldout: Images to hold out of the training file for every choice, stratified by class; None takes
            5000, or a fifth of the training file where that is less.
        train_images: How many of the others to train on, stratified by class, for quick trials; None for all.
        seed: Seed of the draw of the held-out images.
        mean: Per-channel mean for pixels in [0, 1]; None takes the dataset's own, or measures it.
        std: Per-channel standard deviation for pixels in [0, 1]; None takes the dataset's own, or measures
            it.
        padding: Padding of the random crop in pixels; None takes the dataset's own.
        flip: Whether training images are mirrored at random; None takes the dataset's own.
        **options: The source's own options, such as `path` for npz and imagefolder.

    Raises:
        ConfigError: The name or an option is unknown, or `heldout` leaves no image to train on.
        DataError: The files are missing or damaged, or their shapes or labels do not fit.
    """
    source = dataset_source(name)
    for option in options:
        if option not in source.options:
            raise ConfigError(
                f"dataset {name!r} has no option {option!r}; it has {', '.join(source.options) or 'none'}."
                f"{did_you_mean(option, source.options)}"
            )
    missing = [
        parameter.name
        for parameter in inspect.signature(source.read).parameters.values()
        if parameter.default is parameter.empty
        and parameter.name != "root"
        and options.get(parameter.name) is None
    ]
    if missing:
        raise ConfigError(
            f"dataset {name!r} needs the option {missing[0]!r}, for example dataset.{missing[0]}=..."
        )
    folder = Path(root if root is not None else os.environ.get("RANKRL_DATA") or "data")
    files = source.read(folder, **options)
    classes = _check(name, files)
    measured_mean, measured_std = (
        (source.mean, source.std)
        if source.mean is not None and source.std is not None
        else channel_statistics(files.train)
    )
    size = _heldout_size(name, heldout, len(files.train), classes)
    stay, drawn = stratified_split(files.train.y, size, seed)
    if train_images is not None:
        if not 1 <= train_images <= len(stay):
            raise ConfigError(
                f"dataset.train_images must lie between 1 and {len(stay)}, the images of {name!r} that are "
                f"not held out, or be null; got {train_images}"
            )
        stay = stay[stratified_split(files.train.y[stay], train_images, seed)[1]]
    default = source.augmentation
    return ImageData(
        name=name,
        train=files.train.subset(stay),
        heldout=files.train.subset(drawn),
        test=TestImages(files.test),
        classes=classes,
        mean=_normalisation(name, "mean", mean, measured_mean, files.train),
        std=_normalisation(name, "std", std, measured_std, files.train),
        augmentation=Augmentation(
            padding=default.padding if padding is None else padding,
            flip=default.flip if flip is None else flip,
        ),
        class_names=files.class_names,
        resize=files.resize,
        colours=files.colours,
    )


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel, for pixels in [0, 1]; 1 for that of a constant one."""
    channels = images.x.shape[1]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(channels):
        # A histogram of 256 levels is exact and needs no float copy of the images.
        weight = torch.bincount(images.x[:, channel].flatten(), minlength=256).double()
        weight /= weight.sum()
        mean = float((weight * levels).sum())
        variance = float((weight * (levels - mean) ** 2).sum())
        means.append(mean)
        stds.append(variance**0.5 if variance > 1e-12 else 1.0)
    return tuple(means), tuple(stds)


def _check(name: str, files: SourceFiles) -> int:
    """Check that shapes and labels of the files agree; return the number of classes."""
    train, test = files.train, files.test
    for part, images in (("training", train), ("test", test)):
        if len(images) == 0 or 0 in images.x.shape:
            raise DataError(f"dataset {name!r} has no {part} images (shape {tuple(images.x.shape)})")
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(
            f"dataset {name!r}: training images have shape {tuple(train.x.shape[1:])} (channels, height, "
            f"width) but test images {tuple(test.x.shape[1:])}; they must be the same"
        )
    names = files.class_names
    classes = files.classes
    if classes is None:
        classes = int(train.y.max()) + 1 if names is None else len(names)
    if names is not None and len(names) != classes:
        raise DataError(f"dataset {name!r} has {len(names)} class names for {classes} classes")
    twice = sorted({label for label in names or () if (names or ()).count(label) > 1})
    if twice:
        raise DataError(f"dataset {name!r} names {twice[0]!r} twice; every class needs a name of its own")
    if classes < 2:
        raise DataError(f"dataset {name!r} has {classes} class; classification needs at least 2")
    for part, images in (("training", train), ("test", test)):
        if int(images.y.max()) >= classes:
            raise DataError(
                f"dataset {name!r}: a {part} label is {int(images.y.max())}, but with {classes} classes "
                f"labels run from 0 to {classes - 1}"
            )
    return classes


def _heldout_size(name: str, heldout: int | None, count: int, classes: int) -> int:
    if heldout is None:
        heldout = min(DEFAULT_HELDOUT, count // 5)
        if heldout < 1:
            raise DataError(f"dataset {name!r} has only {count} training images; at least 5 are needed")
    if isinstance(heldout, bool) or not isinstance(heldout, int) or not 1 <= heldout < count:
        raise ConfigError(
            f"dataset.heldout must be between 1 and {count - 1} for {name!r}, which has {count} training "
            f"images, got {heldout!r}"
        )
    return heldout


def _normalisation(
    name: str, what: str, configured: Sequence[float] | None, default: tuple[float, ...], images: Images
) -> tuple[float, ...]:
    values = default if configured is None else tuple(float(value) for value in configured)
    channels = images.x.shape[1]
    if len(values) != channels:
        raise DataError(
            f"dataset {name!r}: {what} has {counted(len(values), 'value')}, but the images have "
            f"{counted(channels, 'channel')}; "
            f"give dataset.{what} one value per channel"
        )
    if what == "std" and not all(value > 0 for value in values):
        raise ConfigError(f"dataset.std must be positive, got {values}")
    return values
