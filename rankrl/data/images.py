"""Hold labelled images; define their preprocessing, augmentation and split into training and test."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankrl.errors import ConfigError, DataError, counted


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the zero-padded image and random horizontal flip (He et al. 2016, section 4.2)."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise ConfigError(
                f"augmentation padding must be a whole number of pixels >= 0, got {self.padding!r}"
            )

    def draw(self, count: int, generator: torch.Generator) -> Crops:
        return Crops(
            top=torch.randint(2 * self.padding + 1, (count,), generator=generator),
            left=torch.randint(2 * self.padding + 1, (count,), generator=generator),
            mirrored=torch.rand(count, generator=generator) < (0.5 if self.flip else 0.0),
            padding=self.padding,
        )


@dataclass(frozen=True, eq=False)
class Crops:
    """Offsets of the crop and flips of each image of a batch, shape (N,) each."""

    top: Tensor
    left: Tensor
    mirrored: Tensor
    padding: int

    def to(self, device: torch.device) -> Crops:
        return Crops(self.top.to(device), self.left.to(device), self.mirrored.to(device), self.padding)

    def part(self, start: int, stop: int) -> Crops:
        return Crops(self.top[start:stop], self.left[start:stop], self.mirrored[start:stop], self.padding)

    def apply(self, x: Tensor) -> Tensor:
        """Crop and mirror a batch (N, C, H, W)."""
        count, channels, height, width = x.shape
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, *([self.padding] * 4)))
        rows = self.top[:, None] + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device).expand(count, width)
        columns = torch.where(self.mirrored[:, None], width - 1 - columns, columns) + self.left[:, None]
        # One gather by flat pixel index is 2 to 4 times as fast as indexing with three tensors.
        image = torch.arange(count, device=x.device)[:, None, None]
        pixel = (image * padded.shape[1] + rows[:, :, None]) * padded.shape[2] + columns[:, None, :]
        cropped = padded.reshape(-1, channels).index_select(0, pixel.flatten())
        return cropped.view(count, height, width, channels).permute(0, 3, 1, 2)


SCALE = 1 / 255
"""From a byte to the range [0, 1]."""
_RESIZE = {"interpolation": "bilinear", "antialias": True, "crop": "centre"}
_COLOURS = ("RGB", None)


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of images into a network's input: (pixel / 255 - mean) / std, channel by channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    colours: str | None = None
    class_names: tuple[str, ...] | None = None
    in_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width"):
            _check_size(name, getattr(self, name))
        if self.resize is not None:
            _check_size("resize", self.resize)
        check_normalisation(self.mean, self.std, self.channels)
        if self.colours not in _COLOURS:
            raise DataError(f"preprocessing: colours is {self.colours!r}; it must be 'RGB' or null")
        names = self.class_names
        if names is not None and not all(isinstance(name, str) for name in names):
            raise DataError(f"preprocessing: class_names must be text, got {names!r}")
        if not isinstance(self.in_graph, bool):
            raise DataError(f"preprocessing: in_graph must be true or false, got {self.in_graph!r}")

    @property
    def dtype(self) -> str:
        return "uint8" if self.in_graph else "float32"

    @property
    def layout(self) -> str:
        """The order of the input's axes; bytes are channels last, as in files and cameras."""
        return "NHWC" if self.in_graph else "NCHW"

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of one input without the batch axis, in its layout."""
        if self.in_graph:
            return self.height, self.width, self.channels
        return self.channels, self.height, self.width

    def scale_and_offset(self) -> tuple[Tensor, Tensor]:
        return scale_and_offset(self.mean, self.std)

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise images (N, height, width, channels) of the input's size to (N, channels, ...)."""
        shape = (self.height, self.width, self.channels)
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != shape:
            raise DataError(
                f"images must be uint8 of shape (N, {', '.join(map(str, shape))}), got "
                f"{images.dtype} {tuple(images.shape)}"
            )
        scale, offset = (tensor.view(-1, 1, 1).to(images.device) for tensor in self.scale_and_offset())
        return images.permute(0, 3, 1, 2).contiguous().float().mul_(scale).add_(offset)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict that is self-contained for readers outside rankrl."""
        return {
            "dtype": self.dtype,
            "layout": self.layout,
            "channels": self.channels,
            "height": self.height,
            "width": self.width,
            "colours": self.colours,
            "resize": None if self.resize is None else {"shorter_side": self.resize, **_RESIZE},
            "scale": SCALE,
            "mean": list(self.mean),
            "std": list(self.std),
            "in_graph": self.in_graph,
            "class_names": None if self.class_names is None else list(self.class_names),
        }

    @classmethod
    def from_dict(cls, values: Any) -> Preprocessing:
        """Read a dict of `to_dict`; refuse missing and unknown keys."""
        if not isinstance(values, Mapping):
            raise DataError(f"preprocessing must be an object, got {type(values).__name__}")
        keys = cls(1, 1, 1, (0.0,), (1.0,)).to_dict().keys()
        missing, unknown = sorted(keys - values.keys()), sorted(values.keys() - keys)
        if missing or unknown:
            raise DataError(f"preprocessing: entries missing {missing}, unknown {unknown}")
        resize = values["resize"]
        if resize is not None and not (
            isinstance(resize, Mapping) and {**resize, "shorter_side": 0} == {**_RESIZE, "shorter_side": 0}
        ):
            raise DataError(
                f"preprocessing: resize must be null or {{'shorter_side': PIXELS, ...}} with {_RESIZE}, "
                f"got {resize!r}"
            )
        for name in ("mean", "std", "class_names"):
            if not isinstance(values[name], list) and not (name == "class_names" and values[name] is None):
                raise DataError(f"preprocessing: {name} must be a list, got {values[name]!r}")
        given: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        given["resize"] = None if resize is None else resize.get("shorter_side")
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        preprocessing = cls(**given | lists)
        for name, expected in preprocessing.to_dict().items():
            if values[name] != expected:
                raise DataError(f"preprocessing: {name} is {values[name]!r}; it must be {expected!r}")
        return preprocessing


def check_normalisation(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Refuse a mean or standard deviation that does not match the number of channels."""
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise DataError(
                f"normalisation {name} has {counted(len(values), 'value')} but the images have "
                f"{counted(channels, 'channel')}"
            )
        numeric = all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
        if not numeric:
            raise DataError(f"normalisation {name} must hold finite numbers, got {tuple(values)}")
    if not all(value > 0 for value in std):
        raise DataError(f"normalisation std must be positive, got {tuple(std)}")


def scale_and_offset(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return float32 factors (C,) with byte * scale + offset = (byte / 255 - mean) / std."""
    means, deviations = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    return (1 / (255 * deviations)).float(), (-means / deviations).float()


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"preprocessing: {name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, kept as bytes: x (N, C, H, W), y (N,)."""

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
        """Return a hash of the images and labels, independent of their memory format."""
        hasher = hashlib.sha256(self.x.cpu().contiguous().numpy().tobytes())
        hasher.update(self.y.cpu().numpy().tobytes())
        return hasher.hexdigest()[:16]

    def to(self, device: torch.device) -> Images:
        return Images(self.x.to(device), self.y.to(device))


class TestImages:
    """The images of the test set. They choose nothing: only a final report may read them.

    This is deliberately no `Images` and has no `x`: a search, an early stop or any other selection that gets
    test images by mistake fails in the type checker and at run time.
    """

    __test__ = False  # keeps pytest from collecting the class for its name

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def for_report(self) -> Images:
        """Return the images, for reporting a number on which no choice depends."""
        return self._images


@dataclass(frozen=True, eq=False)
class ImageData:
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
