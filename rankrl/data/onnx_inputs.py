"""Inputs for a network in an ONNX file: its name among the datasets; there are no labels and no splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankrl.data.augmentation import Augmentation
from rankrl.data.registry import SourceFiles, register_dataset
from rankrl.errors import ConfigError


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
