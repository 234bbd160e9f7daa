"""Read datasets from folders of image files, decoded, resized, cropped and scaled to 8 bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rankrl.data.arrays import images_from_arrays
from rankrl.data.datasets import SourceFiles, register_dataset
from rankrl.data.images import Augmentation, Images
from rankrl.errors import ConfigError, DataError

_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
"""Tags of TIFF 6.0, sections 8 and 3."""
_SCALED_TO_16_BITS = ("PNG", "PPM")
"""Formats of which Pillow hands whole numbers in 32 bits that go up to 65535."""


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale greyscale images of 16 bits or floats in [0, 1] to 8 bits; others are returned as they are.

    Pillow's own `convert` clips such pixels at 255. Images of several channels it scales when opening them.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # also true of NaN
            raise ValueError(
                f"its pixels are floating-point numbers from {low:g} to {high:g}, of which nobody knows what "
                "white is; scale them to [0, 1]"
            )
        white = 1
    elif image.mode.startswith("I;16"):
        white = 2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
    elif image.format in _SCALED_TO_16_BITS:
        white = 2**16 - 1
    else:
        raise ValueError(
            "its pixels are whole numbers of 32 bits or with a sign, of which nobody knows what white is; "
            "store them in 8 or 16 bits without a sign"
        )
    scaled = np.rint(values * (255 / white)).astype(np.uint8)
    return Image.fromarray(255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled)


SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""File name endings, in lower case, that count as images."""


@register_dataset(
    "imagefolder",
    "your own folder with train/CLASS/ and val/CLASS/ (or test/) image files",
    augmentation=Augmentation(padding=4, flip=True),
)
def imagefolder(root: Path, path: str | Path, size: int = 224, resize: int | None = None) -> SourceFiles:
    """Decode every image file of a folder.

    Each image is converted to RGB in 8 bits (16 bits and floats in [0, 1] are scaled), resized (bilinear,
    antialiased) so that its shorter side is `resize` pixels, and cropped to the central square. Everything is
    kept in memory: 3 * size² bytes an image.

    Args:
        root: Not used; `path` says where the folder is.
        path: A folder with `train` and with `val` or `test`, each holding one folder per class. Classes
            are numbered in the alphabetical order of the folders in `train`.
        size: Height and width of the images in pixels.
        resize: Length of the shorter side before the crop, at least `size`; `size` when omitted.
            torchvision's ImageNet weights expect 256 with size 224.

    Raises:
        ConfigError: `size` or `resize` is out of range.
        DataError: A folder is missing or empty, a class is unknown, or a file cannot be decoded or does not
            say what its white is.
    """
    del root
    folder = Path(path)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"dataset.size must be a whole number of pixels >= 1, got {size!r}")
    shorter = size if resize is None else resize
    if isinstance(shorter, bool) or not isinstance(shorter, int) or shorter < size:
        raise ConfigError(f"dataset.resize must be a whole number >= dataset.size={size}, got {resize!r}")
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; an image folder holds train/CLASS/ and val/CLASS/")
    names = [name for name in ("val", "test") if (folder / name).is_dir()]
    if not (folder / "train").is_dir() or not names:
        raise DataError(
            f"{folder} must hold a folder `train` and a folder `val` or `test`, each with class folders"
        )
    classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} must hold at least two class folders, got {classes}")
    # `test` is preferred to `val`, on which networks are usually tuned.
    return SourceFiles(
        _read(folder / "train", classes, size, shorter),
        _read(folder / names[-1], classes, size, shorter),
        classes=len(classes),
        class_names=tuple(classes),
        resize=shorter,
        colours="RGB",
    )


def _read(folder: Path, classes: list[str], size: int, shorter: int) -> Images:
    files: list[Path] = []
    labels: list[int] = []
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            continue
        if entry.name not in classes:
            raise DataError(
                f"{entry} is a class that the training folder lacks; it has {', '.join(classes[:10])}"
            )
        images = image_files(entry)
        if not images:
            raise DataError(
                f"the class folder {entry} holds no image files ({', '.join(sorted(SUFFIXES))}); put images "
                f"of the class into it, or remove it if {entry.name!r} is no class"
            )
        files += images
        labels += [classes.index(entry.name)] * len(images)
    if not files:
        raise DataError(
            f"{folder} holds no class folders; it needs one for each of {', '.join(classes[:10])}"
        )
    pixels = decode_images(files, size, size, shorter)
    return images_from_arrays(pixels, np.asarray(labels), where=str(folder))


def image_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def decode_images(
    files: Sequence[Path], height: int, width: int, shorter: int, mode: Literal["RGB", "L"] = "RGB"
) -> NDArray[np.uint8]:
    """Decode image files as (N, height, width, 3 or 1), resized (bilinear, antialiased) and cropped."""
    pixels = np.empty((len(files), height, width, 3 if mode == "RGB" else 1), dtype=np.uint8)

    def decode(index: int) -> None:
        pixels[index] = _decode(files[index], height, width, shorter, mode).reshape(pixels.shape[1:])

    # Decoding and resizing release the interpreter lock, so threads use every core.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(decode, range(len(files))):
            pass
    return pixels


def _decode(path: Path, height: int, width: int, shorter: int, mode: str) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as file:
            image = eight_bits(file).convert(mode)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot decode the image {path}: {error}. Replace or remove the file.") from error
    whole_width, whole_height = image.size
    scale = max(shorter / min(image.size), width / whole_width, height / whole_height)
    across, down = max(width, round(whole_width * scale)), max(height, round(whole_height * scale))
    image = image.resize((across, down), Image.Resampling.BILINEAR)
    left, top = (across - width) // 2, (down - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.uint8)
