"""Options of the networks that can be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelOptions:
    """What every network has, whatever its own options.

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
