"""Images and labels out of numpy arrays, and the .npz files that hold them."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rankrl.data.images import Images
from rankrl.errors import DataError

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
"""What numpy and zipfile raise for bytes that are no plain arrays, damaged headers included."""


def images_from_arrays(x: NDArray[np.generic], y: NDArray[np.generic], *, where: str) -> Images:
    """Check numpy arrays and turn them into `Images` without copying the pixels.

    Shapes: x (N, H, W, C) and (N, H, W), y (N,).
    """
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
