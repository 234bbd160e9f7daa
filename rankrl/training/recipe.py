"""A training recipe: everything that decides how a network is trained, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankrl.errors import ConfigError, did_you_mean
from rankrl.options.training import RecipeOptions, check_number, check_whole
from rankrl.training.schedule import list_schedules


@dataclass(frozen=True)
class TrainingRecipe(RecipeOptions):
    """How to train, from scratch or from trained weights.

    The defaults suit the fine-tuning of a compressed network; training from scratch wants more epochs and
    usually SGD: `TrainingRecipe(epochs=200, lr=0.1, optimizer="sgd", optimizer_options={"momentum": 0.9,
    "weight_decay": 1e-4}, decay_vectors=True)` is near that of He et al. 2016.

    Attributes:
        epochs: Passes through the training images, at least 1.
        restore_best: Whether the weights with the best held-out accuracy are returned, those before the first
            epoch included, rather than the last.
        lr: Highest learning rate of the schedule, positive.
        optimizer: A name of `optim.list_optimizers()`.
        optimizer_options: Its options other than the learning rate, such as momentum or weight decay.
        decay_vectors: Whether weight decay (`weight_decay`, `norm_coefficient`) also applies to biases and
            batch-normalisation parameters.
        seed: Seed of everything random: order, augmentation, dropout.
    """

    restore_best: bool = True
    lr: float = 1e-3
    optimizer: str = "onnx_adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    decay_vectors: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("epochs", self.epochs, 1)
        check_whole("seed", self.seed, 0)
        check_number(self, "lr", "positive", lambda value: 0 < value < float("inf"))
        if self.schedule not in list_schedules():
            raise ConfigError(
                f"schedule must be one of {', '.join(list_schedules())}, got {self.schedule!r}."
                f"{did_you_mean(self.schedule, list_schedules())}"
            )
        if "lr" in self.optimizer_options:
            raise ConfigError("give the learning rate as lr, not in optimizer_options")
