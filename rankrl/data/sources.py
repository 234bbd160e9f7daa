"""Read datasets: .npz files, scikit-learn's digits, image folders, CIFAR, MNIST, inputs of ONNX networks."""

from __future__ import annotations

import logging
import os
import shutil
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

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
