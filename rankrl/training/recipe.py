"""A training recipe: everything that decides how a network is trained, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankrl.errors import ConfigError, did_you_mean
from rankrl.training.schedule import list_schedules


@dataclass(frozen=True)
class TrainingRecipe:
    """How to train, from scratch or from given weights.

    The defaults suit the fine-tuning of a compressed network; training from scratch wants more epochs and
    usually SGD: `TrainingRecipe(epochs=200, lr=0.1, optimizer="sgd", optimizer_options={"momentum": 0.9,
    "weight_decay": 1e-4}, decay_vectors=True)` is near that of He et al. 2016.

    Attributes:
        epochs: Passes through the training images, at least 1.
        batch_size: Images in a step, at least 1; a smaller training set makes one batch.
        lr: Highest learning rate of the schedule, positive.
        halvings: How often a training that diverges, or falls back to guessing, starts again from its first
            weights with half the learning rate; 0 never.
        optimizer: A name of `optim.list_optimizers()`.
        optimizer_options: Its options beside the learning rate, such as momentum or weight decay.
        decay_vectors: Whether weight decay (`weight_decay`, `norm_coefficient`) also applies to biases and
            batch-normalisation parameters.
        product_decay: Weight decay on the weight that each factorised layer's cores contract to, 0 or more;
            the optimizer's own then spares the cores (Frobenius decay, Khodak et al., ICLR 2021).
        balance_cores: Whether the cores of factorised layers are sized alike before the first step, so that
            one learning rate suits them all; layers in integers stay as they are.
        schedule: "constant", "cosine" or "one_cycle"; see `rankrl.training.schedule`.
        warmup: Fraction of all steps in which the learning rate rises, 0 to below 1.
        label_smoothing: Probability mass spread over all classes, 0 to below 1 (Szegedy et al. 2016).
        gradient_clip: Largest Euclidean norm of the whole gradient, or None for no clipping.
        ema_decay: Decay of the moving average of the weights, below 1, or None for no average. With one, the
            average is what is scored and returned.
        distillation: Share m of the teacher in the loss, 0 (no teacher) to 1: (1 - m) * cross-entropy +
            m * T^2 * KL(teacher || student) (Hinton et al. 2015).
        temperature: T of the distillation, positive.
        augment: Whether training images are cropped and flipped at random.
        early_stop_patience: Epochs without a better held-out accuracy after which training ends, or None.
        restore_best: Whether the weights with the best held-out accuracy are returned, those before the first
            epoch included, rather than the last.
        seed: Seed of everything random: order, augmentation, dropout.
    """

    epochs: int = 10
    batch_size: int = 128
    lr: float = 1e-3
    halvings: int = 4
    optimizer: str = "onnx_adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    decay_vectors: bool = False
    product_decay: float = 0.0
    balance_cores: bool = False
    schedule: str = "cosine"
    warmup: float = 0.05
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    ema_decay: float | None = None
    distillation: float = 0.0
    temperature: float = 4.0
    augment: bool = True
    early_stop_patience: int | None = None
    restore_best: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _require_whole(name, getattr(self, name), 1)
        for name in ("seed", "halvings"):
            _require_whole(name, getattr(self, name), 0)
        if self.early_stop_patience is not None:
            _require_whole("early_stop_patience", self.early_stop_patience, 1)
        _require(self, "lr", "positive", lambda value: 0 < value < float("inf"))
        _require(self, "temperature", "positive", lambda value: 0 < value < float("inf"))
        _require(self, "product_decay", "0 or more", lambda value: 0 <= value < float("inf"))
        _require(self, "warmup", "at least 0 and below 1", lambda value: 0 <= value < 1)
        _require(self, "label_smoothing", "at least 0 and below 1", lambda value: 0 <= value < 1)
        _require(self, "distillation", "between 0 and 1", lambda value: 0 <= value <= 1)
        if self.gradient_clip is not None:
            _require(self, "gradient_clip", "positive", lambda value: 0 < value < float("inf"))
        if self.ema_decay is not None:
            _require(self, "ema_decay", "at least 0 and below 1", lambda value: 0 <= value < 1)
        if self.schedule not in list_schedules():
            raise ConfigError(
                f"schedule must be one of {', '.join(list_schedules())}, got {self.schedule!r}."
                f"{did_you_mean(self.schedule, list_schedules())}"
            )
        if "lr" in self.optimizer_options:
            raise ConfigError("give the learning rate as lr, not in optimizer_options")


def _require_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")


def _require(recipe: TrainingRecipe, name: str, allowed: str, holds: Callable[[float], bool]) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
