"""A user's own dataset in one .npz file."""

from __future__ import annotations

import logging
from pathlib import Path

from rankrl.data.arrays import read_npz
from rankrl.data.augmentation import Augmentation
from rankrl.data.registry import SourceFiles, register_dataset

log = logging.getLogger(__name__)


@register_dataset(
    "npz",
    "your own .npz with x_train, y_train, x_test, y_test (uint8 images N,H,W,C; integer labels), class_names",
    augmentation=Augmentation(padding=4, flip=True),
)
def npz(root: Path, path: str | Path, classes: int | None = None) -> SourceFiles:
    """Read a .npz file.

    Args:
        root: Not used; `path` says where the file is.
        path: The file, absolute or from the current folder.
        classes: Number of classes, where not every class occurs in the training labels; that of the class
            names where the file has some.
    """
    del root
    train, test, names = read_npz(Path(path))
    if classes is None and names is None and len(train) and int(train.y.min()) > 0:
        class_count = int(train.y.max()) + 1
        log.warning(
            "%s: no training image has label 0, and the network gets %d classes. If the classes were counted "
            "from 1, subtract 1 from all labels; if not, dataset.classes=%d says so",
            path,
            class_count,
            class_count,
        )
    return SourceFiles(train, test, classes, names)
