"""The state of a training between two epochs, in one file, so that a killed run goes on exactly.

Everything random in an epoch follows from the recipe's seed and the epoch's number, and the learning rate
from the step; so the state is the tensors (network, average, optimizer, best weights) and the history. One
.safetensors file, whose metadata holds the rest as JSON, is replaced atomically: it is never half of one
epoch and half of the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankrl.errors import CheckpointError
from rankrl.state_file import read_state, write_state
from rankrl.training.average import WeightAverage

_VERSION = 1


@dataclass(frozen=True)
class EpochRow:
    """What one epoch brought.

    Attributes:
        epoch: Number of the epoch, from 1 on.
        lr: Learning rate of its last step.
        loss: Mean training loss.
        accuracy: Held-out accuracy after it, 0 to 1.
        seconds: Wall-clock time of its steps and its scoring.
    """

    epoch: int
    lr: float
    loss: float
    accuracy: float
    seconds: float


@dataclass(eq=False)
class TrainingState:
    """Everything that a training changes.

    Attributes:
        model: The network in training.
        optimizer: Its optimizer.
        average: The moving average of its weights, or None.
        setup: Plain values that must be equal for a resumed run to be the same run.
        history: One row per finished epoch.
        best: Weights of the epoch with the best held-out accuracy, or None before the first.
    """

    model: nn.Module
    optimizer: Optimizer
    average: WeightAverage | None
    setup: Mapping[str, Any]
    history: list[EpochRow] = field(default_factory=list)
    best: dict[str, Tensor] | None = None

    @property
    def scored_model(self) -> nn.Module:
        """The network whose accuracy counts: the average where there is one."""
        return self.model if self.average is None else self.average.model

    @property
    def best_row(self) -> EpochRow | None:
        """The first epoch with the best held-out accuracy, or None before the first."""
        return max(self.history, key=lambda row: row.accuracy, default=None)

    def finish_epoch(self, row: EpochRow) -> None:
        """Add an epoch to the history and keep its weights when they are the best so far."""
        self.history.append(row)
        if self.best_row is row:
            self.best = {key: value.clone() for key, value in self.scored_model.state_dict().items()}

    def save(self, path: Path) -> None:
        """Write the state to `path`, atomically.

        Raises:
            StorageError: The file cannot be written.
        """
        optimizer = self.optimizer.state_dict()
        tensors = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{key}": value for key, value in self.average.model.state_dict().items()}
        tensors |= {f"best.{key}": value for key, value in (self.best or {}).items()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, entries in optimizer["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{key}"] = value
                else:
                    scalars.setdefault(str(index), {})[key] = value
        content = {
            "setup": self.setup,
            "history": [asdict(row) for row in self.history],
            "updates": 0 if self.average is None else self.average.updates,
            "optimizer_groups": optimizer["param_groups"],
            "optimizer_scalars": scalars,
        }
        write_state(path, tensors, content, _VERSION)

    def restore(self, path: Path) -> None:
        """Take over the state that `save` wrote.

        Raises:
            CheckpointError: The file is missing or damaged, or belongs to a run with another setup.
        """
        tensors, content = read_state(path, _VERSION, "training state")
        setup = json.loads(json.dumps(self.setup))
        for key, value in setup.items():
            if content["setup"].get(key) != value:
                raise CheckpointError(
                    f"{path} belongs to another training: {key} was {content['setup'].get(key)!r}, is now "
                    f"{value!r}. Use the same settings to resume, or start without resuming."
                )
        try:
            self.model.load_state_dict(_part(tensors, "model."))
            if self.average is not None:
                self.average.model.load_state_dict(_part(tensors, "average."))
                self.average.updates = content["updates"]
            self._restore_optimizer(tensors, content)
            self.history = [EpochRow(**row) for row in content["history"]]
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} does not fit this network and optimizer: {error}. Start without resuming."
            ) from error
        current = self.scored_model.state_dict()
        self.best = {
            key: value.to(current[key].device) for key, value in _part(tensors, "best.").items()
        } or None

    def _restore_optimizer(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        entries: dict[int, dict[str, Any]] = {
            int(index): dict(values) for index, values in content["optimizer_scalars"].items()
        }
        for key, value in _part(tensors, "optimizer.").items():
            index, _, name = key.partition(".")
            entries.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({"state": entries, "param_groups": content["optimizer_groups"]})
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                # As in the undisturbed run, moments lie in memory like their parameter: the same kernels run.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
