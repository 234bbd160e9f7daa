"""A folder of image files as the inputs of a network in an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rankrl.data.imagefolder import SUFFIXES, decode_images, image_files
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph.graph_input import GraphInput
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph_edits import Array

_CHANNELS = (1, 3)


@dataclass(frozen=True)
class ImagePreprocessing:
    """How an image file becomes an input: resized, cropped, `(pixel / 255 - mean) / std * scale`.

    The file says nothing of it, and a network that gets other inputs than it was trained on is fitted to
    those: state what it is used with. The order of the axes and the number of channels are the network's own.

    Attributes:
        mean: Taken off each channel, for pixels in [0, 1]; None for 0. ImageNet's is 0.485, 0.456, 0.406.
        std: What each channel is divided by, for pixels in [0, 1]; None for 1. ImageNet's is 0.229, 0.224,
            0.225.
        scale: What the result is multiplied by: 255 for a network that takes pixels from 0 to 255.
        size: Height and width in pixels, where the network leaves them free.
        resize: Length of the shorter side before the central crop; just what the crop needs when omitted.
        order: Order of the channels: `rgb` or `bgr`.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    scale: float = 1.0
    size: int | None = None
    resize: int | None = None
    order: Literal["rgb", "bgr"] = "rgb"

    def read(self, folder: Path, network: OnnxNetwork) -> dict[str, Array]:
        """Read all image files of a folder, and of the folders in it.

        Raises:
            OnnxGraphError: The folder holds no images, the network takes none, or an option does not fit it.
            DataError: A file cannot be decoded.
        """
        entry = self._entry(network)
        files = image_files(folder)
        if not files:
            raise OnnxGraphError(
                f"the folder {folder} holds no image files ({', '.join(sorted(SUFFIXES))}); give a folder of "
                "images, or a .npz or .npy file"
            )
        first = entry.shape[1] in _CHANNELS
        channels = entry.shape[1] if first else entry.shape[3]
        height, width = self._sides(entry, entry.shape[2:] if first else entry.shape[1:3])
        shorter = self.resize or min(height, width)
        pixels = decode_images(files, height, width, shorter, "RGB" if channels == 3 else "L")
        if self.order == "bgr":
            pixels = pixels[..., ::-1]
        values = pixels if entry.dtype == np.uint8 else self._normalised(pixels).astype(entry.dtype)
        return {entry.name: np.ascontiguousarray(values.transpose(0, 3, 1, 2) if first else values)}

    def _entry(self, network: OnnxNetwork) -> GraphInput:
        """Return the input that takes images, having checked what can be checked before files are read."""
        if self.order not in ("rgb", "bgr"):
            raise OnnxGraphError(f"the order of the channels is rgb or bgr, got {self.order!r}")
        entry = network.inputs[0]
        images = len(entry.shape) == 4 and not set(_CHANNELS).isdisjoint((entry.shape[1], entry.shape[3]))
        if len(network.inputs) != 1 or not images or entry.dtype.kind not in "fu":
            raise OnnxGraphError(
                f"{network.source} takes {', '.join(map(str, network.inputs))}, which is not one batch of "
                "images with 1 or 3 channels; give a .npz file with one array for each input"
            )
        plain = self.mean is None and self.std is None and self.scale == 1
        if entry.dtype.kind == "u" and (entry.dtype != np.uint8 or not plain):
            raise OnnxGraphError(
                f"{network.source} takes {entry}, pixels as they are in uint8; leave out mean, std and scale"
            )
        return entry

    def _sides(self, entry: GraphInput, sides: Sequence[int | None]) -> tuple[int, int]:
        """Return height and width of the inputs."""
        for name, value in (("size", self.size), ("resize", self.resize)):
            if value is not None and value < 1:
                raise OnnxGraphError(f"{name} is a number of pixels, at least 1, got {value}")
        height, width = (side or self.size for side in sides)
        if height is None or width is None:
            raise OnnxGraphError(
                f"the network takes {entry}, images of any size; say which (dataset.size=224, or size= in "
                "Python)"
            )
        if self.size is not None and any(side not in (None, self.size) for side in sides):
            raise OnnxGraphError(
                f"the network takes {entry}, images of {height} x {width}, but size is {self.size}; leave "
                "it out"
            )
        if self.resize is not None and self.resize < min(height, width):
            raise OnnxGraphError(
                f"resize is {self.resize}, less than the {min(height, width)} pixels of the crop; give at "
                "least that"
            )
        return height, width

    def _normalised(self, pixels: Array) -> Array:
        """Return pixels (N, H, W, channels) as float32, normalised."""
        channels = pixels.shape[-1]
        values = pixels.astype(np.float32) / 255
        for name, values_by_channel, default in (("mean", self.mean, 0.0), ("std", self.std, 1.0)):
            numbers = np.asarray([default] if values_by_channel is None else values_by_channel, np.float32)
            if numbers.shape not in ((1,), (channels,)) or (name == "std" and not (numbers > 0).all()):
                raise OnnxGraphError(
                    f"{name} is {values_by_channel}; give one number for each of the {channels} channels"
                    + (", greater than 0" if name == "std" else "")
                )
            values = values - numbers if name == "mean" else values / numbers
        return values * np.float32(self.scale)
