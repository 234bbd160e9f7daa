"""Read datasets from arrays: .npz files, scikit-learn's digits, and inputs of ONNX networks."""

from __future__ import annotations

import logging
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rankrl.data.datasets import SourceFiles, register_dataset, stratified_split
from rankrl.data.images import Augmentation, Images
from rankrl.errors import ConfigError, DataError

log = logging.getLogger(__name__)

KEYS = ("x_train", "y_train", "x_test", "y_test")
"""The four arrays of a dataset file: uint8 images (N, H, W, C) or (N, H, W), integer labels (N,)."""
CLASS_NAMES = "class_names"
"""The array that a dataset file may have besides: text, (classes,)."""

_UNREADABLE = (
    ValueError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that numpy and zipfile raise for bytes that are no plain arrays, damaged headers included."""


def images_from_arrays(x: NDArray[np.generic], y: NDArray[np.generic], *, where: str) -> Images:
    """Check arrays x (N, H, W[, C]) and y (N,), and turn them into `Images` without copying the pixels."""
    if x.dtype != np.uint8:
        raise DataError(f"{where}: images must be uint8 (0 to 255), got {x.dtype}")
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4:
        raise DataError(f"{where}: images must have shape (N, height, width, channels), got {x.shape}")
    if x.shape[1] in (1, 3) and x.shape[3] not in (1, 3):
        raise DataError(
            f"{where}: images of shape {x.shape} look like (N, channels, height, width); "
            "store them as (N, height, width, channels)"
        )
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1:
        raise DataError(f"{where}: labels must be integers of shape (N,), got {y.dtype} {y.shape}")
    if len(x) != len(y):
        raise DataError(f"{where}: there are {len(x)} images but {len(y)} labels")
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise DataError(f"{where}: labels must be class indices from 0 on, got {y.min()} to {y.max()}")
    pixels = torch.from_numpy(np.ascontiguousarray(x)).permute(0, 3, 1, 2)
    return Images(pixels, torch.from_numpy(y.astype(np.int64)))


def read_npz(path: Path) -> tuple[Images, Images, tuple[str, ...] | None]:
    """Read the training images, the test images and the class names, if any, of a dataset file."""
    if not path.is_file():
        raise DataError(f"there is no dataset file {path}; it must be a .npz with {', '.join(KEYS)}")
    try:
        # Pickled object arrays are refused: a dataset must not be able to run code.
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array; a dataset file is a .npz with {', '.join(KEYS)}")
        with file:
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                raise DataError(
                    f"{path} lacks {', '.join(missing)}; it holds {', '.join(file.files) or 'nothing'}, "
                    f"a dataset file holds {', '.join(KEYS)}"
                )
            arrays = {key: file[key] for key in (*KEYS, CLASS_NAMES) if key in file.files}
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is damaged or no .npz file of plain arrays ({error}); write it again with numpy.savez"
        ) from error
    return (
        images_from_arrays(arrays["x_train"], arrays["y_train"], where=f"{path} (x_train, y_train)"),
        images_from_arrays(arrays["x_test"], arrays["y_test"], where=f"{path} (x_test, y_test)"),
        _names(arrays[CLASS_NAMES], path) if CLASS_NAMES in arrays else None,
    )


def _names(names: NDArray[np.generic], path: Path) -> tuple[str, ...]:
    if names.dtype.kind != "U" or names.ndim != 1:
        raise DataError(
            f"{path}: {CLASS_NAMES} must be text of shape (classes,), got {names.dtype} {names.shape}"
        )
    return tuple(str(name) for name in names)


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


_TEST_SHARE = 0.2
_TEST_SEED = 0  # the test set is the same in every run, whatever the run's own seed


@register_dataset(
    "digits",
    "scikit-learn's 1,797 handwritten digits, 1x8x8, 10 classes; needs no file",
    augmentation=Augmentation(padding=1, flip=False),
)
def digits(root: Path) -> SourceFiles:
    """Load scikit-learn's digits with a fixed, stratified fifth as the test set.

    Args:
        root: Not used; the images come with scikit-learn.
    """
    del root
    from sklearn.datasets import load_digits  # a slow import that only this source needs

    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    images = images_from_arrays(pixels, bunch.target, where="scikit-learn's digits")
    train, test = stratified_split(images.y, round(_TEST_SHARE * len(images)), _TEST_SEED)
    names = tuple("0123456789")
    return SourceFiles(images.subset(train), images.subset(test), len(names), names)


@register_dataset(
    "inputs",
    "inputs of model=onnx without labels: dataset.path=inputs.npz (one array for each input), .npy or a "
    "folder of images",
    augmentation=Augmentation(padding=0, flip=False),
)
def inputs(
    root: Path,
    path: str | Path,
    size: int | None = None,
    resize: int | None = None,
    scale: float = 1.0,
    order: str = "rgb",
    batch_axes: Mapping[str, int | None] | None = None,
) -> SourceFiles:
    """Refuse to read labelled images.

    Args:
        root: Not used.
        path: A .npz file with one array for each input of the network by its name, a .npy file, or a folder
            of images, of which each becomes (pixel / 255 - mean) / std * scale.
        size: Height and width of the images in pixels, where the network leaves them free.
        resize: Length of the shorter side before the central crop; what the crop needs when omitted.
        scale: What normalised pixels are multiplied by: 255 for a network that takes them from 0 to 255.
        order: Order of the channels: rgb or bgr.
        batch_axes: The axis that counts the inputs of a batch, for inputs of the network by name; null for an
            input that goes with every batch as it is, such as a rate. Axes that are left out are detected.

    Raises:
        ConfigError: Always.
    """
    del root, size, resize, scale, order, batch_axes
    raise ConfigError(
        f"dataset=inputs ({path}) holds no labels and goes with model=onnx model.path=net.onnx alone; for a "
        "network in PyTorch take dataset=npz or another one"
    )
