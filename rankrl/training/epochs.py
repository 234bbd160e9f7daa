"""Run epochs of any training: take steps, score, detect divergence, and start again at half the rate."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import FactorisedLayer, Inputs, factorised_layers, run_model
from decomposition.network.rounding import is_rounded
from rankrl.device import Precision
from rankrl.errors import NonFiniteError
from rankrl.training.cuda_graph import clear_negligible, subnormals_as_zero
from rankrl.training.recipe import TrainingRecipe, learning_rate_factor
from rankrl.training.state import EpochRow, TrainingState

log = logging.getLogger(__name__)

_ADVICE = "Lower the learning rate, lengthen the warm-up, or set gradient_clip."
# Reading a loss makes the host wait for a GPU; doing so rarely keeps the GPU busy.
_STEPS_BETWEEN_CHECKS = 25


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training, for a progress bar or a tracker."""

    epoch: int
    epochs: int
    step: int
    steps: int
    lr: float
    loss: float
    best_accuracy: float | None
    row: EpochRow | None = None


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of a training."""

    history: tuple[EpochRow, ...]
    start: float
    epoch: int
    accuracy: float
    stopped_early: bool
    lr: float
    halvings: int


class DivergedError(Exception):
    """The training diverged; the message says where and at which rate."""


class Epochs(ABC):
    """Runs epochs on a `TrainingState`; holds everything that does not change between them."""

    def __init__(
        self,
        recipe: TrainingRecipe,
        precision: Precision,
        *,
        teacher: nn.Module | None,
        products: Sequence[FactorisedLayer],
        batch_size: int,
        steps: int,
        on_step: Callable[[TrainingProgress], None] | None,
    ) -> None:
        self.recipe, self.precision, self.products = recipe, precision, products
        self.teacher = None if teacher is None else teacher.eval()
        self.batch_size, self.steps, self.on_step = batch_size, steps, on_step

    @abstractmethod
    def batches(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        """Yield the batches of inputs and labels of an epoch, in an order given by the seed."""

    @abstractmethod
    def loss(self, outputs: Any, labels: Any, taught: Any) -> Tensor:
        """Return the loss of a step; `taught` are the teacher's outputs, or None."""

    def watch(self, outputs: Any, labels: Any) -> None:  # noqa: B027 - nothing unless overridden
        """Record statistics of a batch's outputs, before the optimizer's step."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return a network's score on the held-out inputs; higher is better."""

    def judge(self, state: TrainingState, epoch: int, loss: float) -> None:
        """Raise `DivergedError` if an epoch with this mean loss has led nowhere."""
        state.learned = True

    def run(self, state: TrainingState) -> None:
        """Train for one epoch, score it, and add it to the history."""
        started = time.perf_counter()
        epoch = len(state.history) + 1
        loss, lr = self._train_epoch(state, epoch)
        clear_negligible(state.model)
        if state.average is not None:
            clear_negligible(state.average)
        self.judge(state, epoch, loss)
        try:
            score = self.score(state.scored_model)
        except NonFiniteError as error:
            raise DivergedError(
                f"after epoch {epoch} of training (learning rate {lr:.3g}): {error}"
            ) from error
        row = EpochRow(epoch, lr, loss, score, time.perf_counter() - started)
        state.finish_epoch(row)
        self._report(state, epoch, epoch * self.steps, lr, loss, row)

    def _train_epoch(self, state: TrainingState, epoch: int) -> tuple[float, float]:
        """Take the steps of an epoch; return its mean loss and the learning rate of its last step."""
        # Order, augmentation and dropout depend on the seed and the epoch alone: a state needs no generators.
        seed = int(np.random.SeedSequence((self.recipe.seed, epoch)).generate_state(1)[0])
        torch.manual_seed(seed)
        state.model.train()
        losses = torch.zeros(self.steps, device=self.precision.device)
        lr, checked = 0.0, 0
        for step, (x, y) in enumerate(self.batches(seed)):
            done = (epoch - 1) * self.steps + step
            total = self.recipe.epochs * self.steps
            lr = state.lr * learning_rate_factor(self.recipe.schedule, done, total, self.recipe.warmup)
            losses[step] = self._step(state, x, y, lr)
            if step + 1 - checked >= _STEPS_BETWEEN_CHECKS or step + 1 == self.steps:
                mean_loss = self._check(losses, checked, step + 1, epoch, state.lr)
                checked = step + 1
                if checked < self.steps:
                    self._report(state, epoch, done + 1, lr, mean_loss)
        return float(losses.mean()), lr

    def _step(self, state: TrainingState, x: Inputs, y: Any, lr: float) -> Tensor:
        """Take one step and return its loss."""
        recipe = self.recipe
        state.optimizer.zero_grad(set_to_none=True)
        loss, outputs = self.passes(state.model, x, y)
        self.watch(outputs, y)
        if recipe.gradient_clip is not None:
            nn.utils.clip_grad_norm_(state.model.parameters(), recipe.gradient_clip)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step()
        if state.average is not None:
            state.average.update_parameters(state.model)
        return loss

    def passes(self, model: nn.Module, x: Inputs, y: Any) -> tuple[Tensor, Any]:
        """Run a batch forward and backward; return its loss and outputs."""
        with self.precision.autocast():
            outputs = run_model(model, x)
            taught = None
            if self.teacher is not None:
                with torch.no_grad():
                    taught = run_model(self.teacher, x)
        loss = self.loss(outputs, y, taught)
        if self.products:
            norms = torch.stack([layer.squared_norm() for layer in self.products])
            loss = loss + self.recipe.product_decay / 2 * norms.sum()
        loss.backward()
        return loss.detach(), tree_map_only(Tensor, Tensor.detach, outputs)

    def _check(self, losses: Tensor, start: int, stop: int, epoch: int, highest: float) -> float:
        """Return the mean loss of steps `start` to `stop` (excluded), all of which must be finite."""
        recent = losses[start:stop].tolist()
        for step, loss in enumerate(recent, start):
            if not np.isfinite(loss):
                done, total = (epoch - 1) * self.steps + step, self.recipe.epochs * self.steps
                factor = learning_rate_factor(self.recipe.schedule, done, total, self.recipe.warmup)
                raise DivergedError(
                    f"the training loss became {loss} in epoch {epoch}, step {step + 1} of {self.steps}, at "
                    f"learning rate {highest * factor:.3g}"
                )
        return sum(recent) / len(recent)

    def _report(
        self, state: TrainingState, epoch: int, step: int, lr: float, loss: float, row: EpochRow | None = None
    ) -> None:
        if self.on_step is None:
            return
        best = state.best_row
        self.on_step(
            TrainingProgress(
                epoch=epoch,
                epochs=self.recipe.epochs,
                step=step,
                steps=self.recipe.epochs * self.steps,
                lr=lr,
                loss=loss,
                best_accuracy=None if best is None else best.accuracy,
                row=row,
            )
        )


@subnormals_as_zero()
def follow(state: TrainingState, epochs: Epochs, recipe: TrainingRecipe, path: Path | None) -> TrainingResult:
    """Train to the last epoch, or until patience ends, and load the weights that the recipe returns."""
    start = state.begin(epochs.score(state.model)) if state.start is None else state.start
    while len(state.history) < recipe.epochs and not _out_of_patience(state, recipe):
        try:
            epochs.run(state)
        except DivergedError as error:
            if state.halvings == recipe.halvings:
                raise NonFiniteError(f"{error}. {_ADVICE}") from error
            state.start_again()
            log.warning(
                "%s; the training starts again with half the highest rate, %.3g (halving %d of %d)",
                error,
                state.lr,
                state.halvings,
                recipe.halvings,
            )
        if path is not None:
            state.save(path)
    row = state.history[-1]
    weights = state.scored_model.state_dict()
    if recipe.restore_best and state.best is not None and state.best_row is not None:
        row, weights = state.best_row, state.best
    state.model.load_state_dict(weights)
    return TrainingResult(
        tuple(state.history),
        start,
        row.epoch,
        row.accuracy,
        len(state.history) < recipe.epochs,
        state.lr,
        state.halvings,
    )


def decayed_products(model: nn.Module, recipe: TrainingRecipe) -> list[FactorisedLayer]:
    """Balance the cores of the layers whose products decay, and return these layers."""
    layers = list(factorised_layers(model).values()) if recipe.product_decay else []
    for layer in layers:
        if not is_rounded(layer):
            layer.balance()
    return layers


def _out_of_patience(state: TrainingState, recipe: TrainingRecipe) -> bool:
    best = state.best_row
    if recipe.early_stop_patience is None or best is None:
        return False
    return len(state.history) - best.epoch >= recipe.early_stop_patience
