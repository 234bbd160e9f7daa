"""Read teachers for distillation from files, and average the outputs of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankrl.data import ImageData
from rankrl.errors import ConfigError, RankrlError
from rankrl.models import checkpoint_preprocessing
from rankrl.options.training import FineTuningOptions
from rankrl.training.networks import build_network, guessing_warning, heldout_accuracy

DISTILLATION = 0.9
"""Share of a teacher in the loss, where one is named and no share: that of `finetune=short`."""


class MeanOutputs(nn.Module):
    """Ensemble of classifiers: the mean of their class scores (N, classes)."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the mean of the networks' outputs, each one tensor of the same shape."""
        return torch.stack([network(*inputs, **named) for network in self.networks]).mean(0)


def together(teachers: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Combine several teachers into one, `MeanOutputs`."""
    if isinstance(teachers, nn.Module) and not isinstance(teachers, nn.ModuleList):
        return teachers
    networks = list(teachers) if isinstance(teachers, Sequence | nn.ModuleList) else [teachers]
    if not networks or not all(isinstance(each, nn.Module) for each in networks):
        kinds = ", ".join(type(each).__name__ for each in networks) or "nothing"
        raise ConfigError(f"teacher= must be a torch.nn.Module or a list of them, got {kinds}")
    return networks[0] if len(networks) == 1 else MeanOutputs(networks)


@dataclass(frozen=True)
class Teacher:
    """A network to distil from."""

    network: nn.Module
    title: str
    accuracy: float


def read_teacher(
    options: FineTuningOptions, model: Mapping[str, Any], data: ImageData, *, seed: int
) -> Teacher:
    """Read the teacher that the options name, or the mean of several."""
    names = options.teacher_models or (str(model["architecture"]),)
    names *= 1 if len(names) > 1 else len(options.teachers)
    own = {} if options.teacher_model else model
    networks, titles = [], []
    for name, path in zip(names, options.teachers, strict=True):
        described = {**own, **options.teacher_options, "architecture": name, "checkpoint": path}
        try:
            networks.append(build_network(described, data, seed=seed))
        except RankrlError as error:
            raise ConfigError(
                f"finetune.teacher={path} with finetune.teacher_model={name} cannot teach on "
                f"dataset={data.name}: {error}"
            ) from error
        _check_normalisation(path, data)
        titles.append(f"{name} ({Path(path).name})")
    network, title = together(networks), " and ".join(titles)
    warning = guessing_warning(network, data)
    if warning is not None:
        raise ConfigError(
            f"finetune.teacher={title}: {warning}. Give one that was trained on {data.name}, with its "
            "classes in this order and its normalisation (dataset.mean, dataset.std)"
        )
    return Teacher(network, title, heldout_accuracy(network, data))


def _check_normalisation(path: str, data: ImageData) -> None:
    """Refuse a checkpoint whose network was trained on images with another normalisation."""
    known, own = checkpoint_preprocessing(path) or {}, data.preprocessing.to_dict()
    for name in ("mean", "std"):
        if known.get(name, own[name]) != own[name]:
            raise ConfigError(
                f"finetune.teacher={path} was trained on images of {name} {known[name]}, those of "
                f"dataset={data.name} have {own[name]}; set dataset.{name} to the teacher's, "
                "or give another one"
            )
