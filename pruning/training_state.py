"""Save the state of a mask training between two epochs, as tensors and plain values, to resume it exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pruning.errors import PruningError
from pruning.training_options import MaskEpoch


@dataclass(frozen=True)
class MaskTrainingState:
    """Everything that a mask training has changed after some of its epochs.

    Random numbers are not part of it: seed torch at the start of every epoch (for example where the batches
    are drawn) and a continued training equals an undisturbed one.

    Attributes:
        tensors: of the network, the masks and the optimizers, by name; not copied.
        values: the rest, fit for JSON.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    @property
    def epochs(self) -> list[MaskEpoch]:
        """The history up to here."""
        return [MaskEpoch(**row) for row in self.values["epochs"]]


def epoch_rows(epochs: list[MaskEpoch]) -> list[dict[str, Any]]:
    """Return a history as plain values."""
    return [asdict(epoch) for epoch in epochs]


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose name starts with `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def optimizer_state(optimizer: Optimizer, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's tensors, named `name.INDEX.KEY`, and its plain values."""
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{index}.{key}"] = value
            else:
                scalars.setdefault(str(index), {})[key] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def restore_optimizer(
    optimizer: Optimizer, name: str, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Restore a state that `optimizer_state` returned."""
    entries: dict[int, dict[str, Any]] = {int(key): dict(row) for key, row in values["scalars"].items()}
    for key, value in part(tensors, f"{name}.").items():
        index, _, entry = key.partition(".")
        entries.setdefault(int(index), {})[entry] = value
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": values["groups"]})
    except (ValueError, KeyError, RuntimeError) as error:
        raise PruningError(
            f"the state of the mask training belongs to another {name} ({error}); start anew"
        ) from error


def restore_module(module: nn.Module, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors that start with `name.` into a module."""
    try:
        module.load_state_dict(part(tensors, f"{name}."))
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise PruningError(
            f"the state of the mask training belongs to another network ({first}); start anew"
        ) from error
