"""Read CIFAR-10, CIFAR-100 and MNIST from NAME.npz or torchvision's files, or download them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankrl.data.arrays import KEYS, images_from_arrays, read_npz
from rankrl.data.datasets import SourceFiles, register_dataset
from rankrl.data.images import Augmentation, Images
from rankrl.errors import DataError

log = logging.getLogger(__name__)


def read_published(
    name: str, root: Path, class_names: Sequence[str], torchvision_class: str, *, colours: str | None = None
) -> SourceFiles:
    """Read a published dataset from the first place that has it.

    torchvision stores CIFAR as Python pickles; it verifies the MD5 sum of every file before it unpickles,
    so only the published bytes are read. `NAME.npz` involves no pickle at all.
    """
    path = root / f"{name}.npz"
    names = tuple(class_names)
    if path.exists():
        train, test, _ = read_npz(path)
        log.info(
            "dataset %s: read %s (RANKRL_DATA names the folder, ./data by default)", name, path.resolve()
        )
        return SourceFiles(train, test, len(names), names, colours=colours)
    help_text = (
        f"Place a file {path} with {', '.join(KEYS)} (uint8 images N,H,W,C; integer labels N) or "
        f"torchvision's {torchvision_class} files in {root}, or point the environment variable "
        "RANKRL_DATA to the folder that has them"
    )
    try:
        from torchvision import datasets  # only this source needs torchvision
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch fails with RuntimeError
        raise DataError(
            f"dataset {name!r} is not in {root}, and torchvision fails ({error}). {help_text}."
        ) from error
    source: Callable[..., Any] = getattr(datasets, torchvision_class)
    there = root.exists()
    try:
        # Files that are there already are verified and used; only missing ones are downloaded.
        parts = [source(root=str(root), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        if not there:  # torchvision makes its folders before it downloads
            _remove_if_empty(root)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"dataset {name!r} is not in {root} and could not be downloaded ({reason}). {help_text}."
        ) from error
    log.info("dataset %s: read torchvision's files in %s", name, root.resolve())
    train, test = (_images(part, name) for part in parts)
    return SourceFiles(train, test, len(names), names, colours=colours)


def _remove_if_empty(root: Path) -> None:
    """Remove a folder that holds no files, only folders."""
    if not any(path.is_file() for path in root.rglob("*")):
        shutil.rmtree(root, ignore_errors=True)


def _images(dataset: Any, name: str) -> Images:
    return images_from_arrays(
        np.asarray(dataset.data), np.asarray(dataset.targets), where=f"torchvision's files of {name}"
    )


CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
"""Names of the fine labels, in their order."""


def _register_cifar(classes: int, names: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    name, about = (
        f"cifar{classes}",
        f"CIFAR-{classes}: 50,000 + 10,000 colour images of 32x32, {classes} classes",
    )

    @register_dataset(name, about, augmentation=Augmentation(padding=4, flip=True), mean=mean, std=std)
    def cifar(root: Path) -> SourceFiles:
        return read_published(name, root, names.split(), name.upper(), colours="RGB")


# ImageNet's statistics: the published CIFAR-10 ResNet checkpoints were trained with them.
_register_cifar(10, CIFAR10_CLASSES, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_register_cifar(100, CIFAR100_CLASSES, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@register_dataset(
    "mnist",
    "MNIST: 60,000 + 10,000 grey digits of 28x28, 10 classes",
    augmentation=Augmentation(padding=2, flip=False),
    mean=(0.1307,),
    std=(0.3081,),
)
def mnist(root: Path) -> SourceFiles:
    return read_published("mnist", root, "0123456789", torchvision_class="MNIST")
