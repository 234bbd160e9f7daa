"""Define training recipes; build their optimizer, learning-rate schedule and weight average."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from decomposition import factorised_layers
from decomposition.registry import Registry
from optim import create_optimizer
from rankrl.errors import ConfigError, did_you_mean
from rankrl.options.training import RecipeOptions, check_number, check_whole

Schedule = Callable[[int, int, float], float]
"""(step, steps, warmup) -> factor of the highest learning rate; step runs from 0 to steps - 1."""

_SCHEDULES: Registry[Schedule] = Registry("schedule", ConfigError)


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    def register(schedule: Schedule) -> Schedule:
        return _SCHEDULES.add(name, schedule)

    return register


def list_schedules() -> list[str]:
    return _SCHEDULES.names()


def learning_rate_factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    return _SCHEDULES[schedule](step, steps, warmup)


@register_schedule("constant")
def constant(step: int, steps: int, warmup: float) -> float:
    """Rise linearly during the warm-up, then stay at 1."""
    rising = round(warmup * steps)
    return (step + 1) / (rising + 1) if step < rising else 1.0


@register_schedule("cosine")
def cosine(step: int, steps: int, warmup: float) -> float:
    """Rise linearly during the warm-up, then fall to 0 along half a cosine (Loshchilov & Hutter 2017)."""
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


@register_schedule("one_cycle")
def one_cycle(step: int, steps: int, warmup: float) -> float:
    """Rise from 1/25 to 1 and fall to 4e-6, both along half a cosine (Smith & Topin 2018).

    The values are those of `torch.optim.lr_scheduler.OneCycleLR` with its defaults and `pct_start=warmup`;
    the momentum stays as it is.
    """
    start, end = 1 / 25, 1 / 25 / 1e4
    peak = warmup * steps - 1
    if step <= peak:
        return _half_cosine(start, 1.0, step / peak if peak > 0 else 1.0)
    first = max(peak, 0.0)
    return _half_cosine(1.0, end, (step - first) / (steps - 1 - first) if steps - 1 > first else 1.0)


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class TrainingRecipe(RecipeOptions):
    """Recipe of a training, from scratch or from trained weights.

    The defaults suit the fine-tuning of a compressed network; training from scratch needs more epochs and
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


_DECAY_OPTIONS = ("weight_decay", "norm_coefficient", "norm_coefficient_post")


def build_optimizer(model: nn.Module, recipe: TrainingRecipe) -> Optimizer:
    """Build the recipe's optimizer with two groups: parameters with and without weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = factorised_layers(model).values() if recipe.product_decay else ()
    cores = {id(parameter) for layer in layers for parameter in layer.parameters()}
    groups: list[dict[str, list[nn.Parameter]]] = [{"params": []}, {"params": []}]
    for parameter in trained:
        spared = id(parameter) in cores or (parameter.ndim <= 1 and not recipe.decay_vectors)
        groups[spared]["params"].append(parameter)
    decayed, groups = groups[0]["params"], [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the network has no parameter that requires a gradient; nothing can be trained")
    try:
        optimizer: Optimizer = create_optimizer(
            recipe.optimizer, groups, lr=recipe.lr, **recipe.optimizer_options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {recipe.optimizer!r}: {error}") from error
    if len(groups) > bool(decayed):
        for option in _DECAY_OPTIONS:
            if option in optimizer.param_groups[-1]:
                optimizer.param_groups[-1][option] = 0.0
    return optimizer


Tensors = tuple[Tensor, ...] | list[Tensor]


class WeightAverage(AveragedModel):
    """Exponential moving average of all parameters and buffers (Tarvainen & Valpola 2017, equation 2).

    The decay is min(decay, (1 + n) / (10 + n)) after n updates, so that a short training does not return its
    starting point. Integer buffers, such as the number of batches seen, are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._follow, use_buffers=True)
        self.decay = decay
        self.eval().requires_grad_(False)
        self.update_parameters(model)  # torch copies the weights at the first update

    @torch.no_grad()
    def _follow(self, averages: Tensors, values: Tensors, _: Tensor | int) -> None:
        """Move averages, all of one dtype, towards the current values."""
        if not averages[0].is_floating_point():
            torch._foreach_copy_(averages, values)
            return
        # Not the count that torch passes: it lies on the weights' device, and reading it would stall a GPU.
        updates = int(self.n_averaged) - 1
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(averages, values, 1 - decay)
