"""Inputs for a network in an ONNX file: its name among the datasets; there are no labels and no splits."""

from __future__ import annotations

from pathlib import Path

from rankrl.data.augmentation import Augmentation
from rankrl.data.registry import SourceFiles, register_dataset
from rankrl.errors import ConfigError


@register_dataset(
    "inputs",
    "inputs of model=onnx without labels: dataset.path=inputs.npz (one array for each input) or .npy",
    augmentation=Augmentation(padding=0, flip=False),
)
def inputs(root: Path, path: str | Path) -> SourceFiles:
    """Refuse to read labelled images.

    Args:
        root: Not used.
        path: A .npz file with one array for each input of the network by its name, or a .npy file.

    Raises:
        ConfigError: Always.
    """
    del root
    raise ConfigError(
        f"dataset=inputs ({path}) holds no labels and goes with model=onnx model.path=net.onnx alone; for a "
        "network in PyTorch take dataset=npz or another one"
    )
