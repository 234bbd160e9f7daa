"""Save and restore the state of a training between epochs, so that a killed run resumes exactly.

Everything random in an epoch depends on the recipe's seed and the epoch's number, and the learning rate on
the step and the number of halvings; so the state is the tensors (network, average, optimizer, best and first
weights), the history and that number. One .safetensors file, whose metadata holds the rest as JSON, is
replaced atomically, so that it never mixes two epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankrl.errors import CheckpointError, ConfigError
from rankrl.state_file import check_setup, read_state, write_state
from rankrl.training.recipe import TrainingRecipe, WeightAverage, build_optimizer

STATE_VERSION = 4


@dataclass(frozen=True)
class EpochRow:
    epoch: int
    lr: float
    loss: float
    accuracy: float
    seconds: float


@dataclass(eq=False)
class TrainingState:
    model: nn.Module
    recipe: TrainingRecipe
    setup: Mapping[str, Any]
    optimizer: Optimizer = field(init=False)
    average: WeightAverage | None = field(init=False)
    history: list[EpochRow] = field(init=False)
    start: float | None = field(init=False, default=None)
    best: dict[str, Tensor] | None = field(init=False)
    halvings: int = field(init=False, default=0)
    learned: bool = field(init=False)

    def __post_init__(self) -> None:
        self._first = _copied(self.model) if self.recipe.halvings else {}
        self._begin()

    def _begin(self) -> None:
        decay = self.recipe.ema_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.optimizer = build_optimizer(self.model, self.recipe)
        self.history = []
        self.best = None
        self.learned = False

    @property
    def lr(self) -> float:
        """Highest learning rate of the schedule, after the halvings."""
        return self.recipe.lr / 2**self.halvings

    @property
    def scored_model(self) -> nn.Module:
        """The network whose accuracy counts: the average, if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def best_row(self) -> EpochRow | None:
        """The first epoch with the best held-out accuracy, 0 for the first weights; None before any."""
        start = [] if self.start is None else [EpochRow(0, 0.0, 0.0, self.start, 0.0)]
        return max([*start, *self.history], key=lambda row: row.accuracy, default=None)

    def begin(self, accuracy: float) -> float:
        """Record and return the held-out accuracy of the first weights, the best so far."""
        self.start = accuracy
        self.best = _copied(self.model)
        return accuracy

    def finish_epoch(self, row: EpochRow) -> None:
        """Add an epoch to the history and keep its weights when they are the best so far."""
        self.history.append(row)
        if self.best_row is row:
            self.best = _copied(self.scored_model)

    def start_again(self) -> None:
        """Restore the first weights and halve the learning rate."""
        self.model.load_state_dict(self._first)
        self.model.zero_grad(set_to_none=True)
        self.halvings += 1
        self._begin()
        if self.start is not None:
            self.begin(self.start)

    def save(self, path: Path) -> None:
        optimizer = self.optimizer.state_dict()
        tensors = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{key}": value for key, value in self.average.state_dict().items()}
        tensors |= {f"best.{key}": value for key, value in (self.best or {}).items()}
        tensors |= {f"first.{key}": value for key, value in self._first.items()}
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
            "start": self.start,
            "halvings": self.halvings,
            "learned": self.learned,
            "optimizer_groups": optimizer["param_groups"],
            "optimizer_scalars": scalars,
        }
        write_state(path, tensors, content, STATE_VERSION)

    def restore(self, path: Path) -> None:
        tensors, content = read_state(path, STATE_VERSION, "training state")
        check_setup(path, "training", content["setup"], self.setup)
        try:
            self.model.load_state_dict(_part(tensors, "model."))
            if self.average is not None:
                self.average.load_state_dict(_part(tensors, "average."))
            self._restore_optimizer(tensors, content)
            self.history = [EpochRow(**row) for row in content["history"]]
            self.start = content["start"]
            self.halvings, self.learned = content["halvings"], content["learned"]
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} does not fit this network and optimizer: {error}. Start without resuming."
            ) from error
        self.best = self._placed(_part(tensors, "best.")) or None
        self._first = self._placed(_part(tensors, "first."))

    def _placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        current = self.model.state_dict()
        return {key: value.to(current[key].device) for key, value in tensors.items()}

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
                # Moments get their parameter's memory format, as if uninterrupted: the same kernels run.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def extend_training(source: Path, target: Path, epochs: int) -> None:
    """Rewrite the state of a finished training so that it can be resumed for more epochs."""
    tensors, content = read_state(source, STATE_VERSION, "training state")
    done = len(content["history"])
    if epochs <= done:
        raise ConfigError(f"{source} has {done} epochs already; give more of them than {epochs}")
    content["setup"]["epochs"] = epochs
    write_state(target, tensors, content, STATE_VERSION)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
