"""Where published datasets are found: NAME.npz, then torchvision's own files, then a download."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankrl.data.arrays import KEYS, images_from_arrays, read_npz
from rankrl.data.images import Images
from rankrl.data.registry import SourceFiles
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
    """Remove a folder in which there are nothing but folders."""
    if not any(path.is_file() for path in root.rglob("*")):
        shutil.rmtree(root, ignore_errors=True)


def _images(dataset: Any, name: str) -> Images:
    return images_from_arrays(
        np.asarray(dataset.data), np.asarray(dataset.targets), where=f"torchvision's files of {name}"
    )
