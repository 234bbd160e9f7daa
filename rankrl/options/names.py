"""Names and options of data sets, models, formats, optimizers and trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import decomposition
from rankrl.options.selectors import NoOptions


def option_fields(section: Any) -> list[Field[Any]]:
    """Return the fields of a section but for those that it names in `PYTHON_ONLY`: constants of a run."""
    return [each for each in fields(section) if each.name not in getattr(section, "PYTHON_ONLY", ())]


def _registered(folder: str, definition: str) -> tuple[str, ...]:
    """Read registered names off the source of `decomposition`: importing it would import torch."""
    files = (Path(decomposition.__file__).parent / folder).glob("*.py")
    sources = [path.read_text(encoding="utf-8") for path in files]
    return tuple(sorted(name for text in sources for name in re.findall(definition, text, re.MULTILINE)))


FORMATS = _registered("formats", r'^@register_format\nclass [\s\S]*?^    name = "(\w+)"$')
"""The names of the formats."""
HEURISTICS = _registered("choose", r'^@register_heuristic\("(\w+)"')
"""The names of the selectors that are rules: one plan, no search."""

OPTIMIZERS = ("onnx_adagrad", "onnx_adam", "sgd")
NO_OPTIONS = ("params", "lr", "maximize", "foreach", "capturable")
"""Parameters of optimizers that trainings set: all of them descend, and torch chooses how it computes."""


@dataclass(frozen=True)
class DatasetOptions:
    """Options that every dataset has next to its own (`rankrl.data.load_dataset`)."""

    heldout: int | None = None
    train_images: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    padding: int | None = None
    flip: bool | None = None


@dataclass(frozen=True, kw_only=True)
class NpzOptions(DatasetOptions):
    """Options of `npz`."""

    path: str | Path
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ImageFolderOptions(DatasetOptions):
    """Options of `imagefolder`."""

    path: str | Path
    size: int = 224
    resize: int | None = None


@dataclass(frozen=True, kw_only=True)
class InputsOptions(DatasetOptions):
    """Options of `inputs`."""

    path: str | Path
    size: int | None = None
    resize: int | None = None
    scale: float = 1.0
    order: str = "rgb"
    batch_axes: Mapping[str, int | None] | None = None


DATASETS: dict[str, type] = {
    "cifar10": DatasetOptions,
    "cifar100": DatasetOptions,
    "digits": DatasetOptions,
    "imagefolder": ImageFolderOptions,
    "inputs": InputsOptions,
    "mnist": DatasetOptions,
    "npz": NpzOptions,
}
"""Options by the dataset's name."""


@dataclass(frozen=True)
class ModelOptions:
    """Options that every network has next to its own.

    Attributes:
        checkpoint: Weights to start from (.th, .pt, .ckpt or .safetensors), a state_dict or a trainer's file
            that holds one; None trains the network first.
    """

    checkpoint: str | Path | None = None


@dataclass(frozen=True)
class CifarResNetOptions(ModelOptions):
    """Options of the ResNets for CIFAR."""

    shortcut: str = "A"


@dataclass(frozen=True)
class ResNet9Options(ModelOptions):
    """Options of `resnet9`."""

    width: int = 64


@dataclass(frozen=True, kw_only=True)
class TorchvisionOptions(ModelOptions):
    """Options of `torchvision`, which hands others on."""

    name: str


@dataclass(frozen=True, kw_only=True)
class CustomOptions(ModelOptions):
    """Options of `custom`, which hands others on."""

    _target_: str


@dataclass(frozen=True, kw_only=True)
class OnnxOptions(ModelOptions):
    """Options of `onnx`."""

    path: str | Path


MODELS: dict[str, type] = {
    "conv4": ModelOptions,
    "custom": CustomOptions,
    "lenet5": ModelOptions,
    "onnx": OnnxOptions,
    "resnet20": CifarResNetOptions,
    "resnet32": CifarResNetOptions,
    "resnet44": CifarResNetOptions,
    "resnet56": CifarResNetOptions,
    "resnet9": ResNet9Options,
    "torchvision": TorchvisionOptions,
}
"""Options by the network's name."""
HAND_ON = frozenset(("custom", "torchvision"))
"""Networks that take other options, too, and hand them on to what they build."""


NONE = "none"
"""The choice of `tracking` that keeps nothing."""


@dataclass(frozen=True)
class MLflowOptions:
    """Options of `mlflow`."""

    uri: str | None = None
    experiment: str = "rankrl"


@dataclass(frozen=True)
class WandbOptions:
    """Options of `wandb`."""

    project: str = "rankrl"
    mode: str | None = None


TRACKERS: dict[str, type] = {
    "csv": NoOptions,
    "mlflow": MLflowOptions,
    "tensorboard": NoOptions,
    "wandb": WandbOptions,
    NONE: NoOptions,
}
"""Options by the tracker's name."""


@dataclass(frozen=True)
class TrackingOptions:
    """Where the run is tracked as it proceeds.

    Attributes:
        name: A registered tracker.
        options: Its own options.
    """

    name: str = "tensorboard"
    options: Mapping[str, Any] = field(default_factory=dict)
