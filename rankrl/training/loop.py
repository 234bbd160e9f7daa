"""The training loop, for training from scratch and for fine-tuning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposition import FactorisedLayer, factorised_layers
from decomposition.rounding import is_rounded
from rankrl.data.batches import batches
from rankrl.data.images import ImageData, Images
from rankrl.device import (
    Precision,
    deterministic_kernels,
    in_layout,
    inference_precision,
    to_fastest_layout,
)
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.models.classifier import check_classifier
from rankrl.training.accuracy import accuracy
from rankrl.training.chance import is_guessing, worse_than_guessing
from rankrl.training.constraint import RankConstraint
from rankrl.training.loss import training_loss
from rankrl.training.recipe import TrainingRecipe
from rankrl.training.schedule import learning_rate_factor
from rankrl.training.state import EpochRow, TrainingState

log = logging.getLogger(__name__)

# Fewer steps show nothing of a network that never learned anything.
_FEWEST_STEPS_JUDGED = 100
_ADVICE = "Lower the learning rate, lengthen the warm-up, or set gradient_clip."
# Reading a loss makes the host wait for a GPU; doing so rarely keeps the GPU busy.
_STEPS_BETWEEN_CHECKS = 25


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training is, for a progress bar or a tracker.

    Attributes:
        epoch: The running epoch, from 1 on.
        epochs: Epochs of the recipe.
        step: Steps done in the whole training.
        steps: Steps of the whole training.
        lr: Learning rate of the last step.
        loss: Mean loss since the last report; at the end of an epoch, of the whole epoch.
        best_accuracy: Best held-out accuracy so far, that of the first weights included.
        row: The epoch's row at its end, or None before.
    """

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
    """What a training brought.

    Attributes:
        history: One row per epoch.
        start: Held-out accuracy before the first epoch, 0 to 1.
        epoch: The epoch whose weights the network has now; 0 where none was better than the first weights.
        accuracy: Held-out accuracy of these weights, 0 to 1.
        stopped_early: Whether the held-out accuracy stopped rising before the last epoch.
        lr: Highest learning rate of the schedule that was followed to the end.
        halvings: How often the training started again with half the rate before.
    """

    history: tuple[EpochRow, ...]
    start: float
    epoch: int
    accuracy: float
    stopped_early: bool
    lr: float
    halvings: int


def train(
    model: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    *,
    precision: Precision | None = None,
    teacher: nn.Module | None = None,
    constraint: RankConstraint | None = None,
    state_file: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[TrainingProgress], None] | None = None,
) -> TrainingResult:
    """Train a network in place.

    Parameters stay float32; with bfloat16 precision the network runs under autocast. Images held out of the
    training file score every epoch; the test set is never read. Equal arguments give equal weights on the
    same machine with the same number of threads.

    A training that diverges starts again from its first weights with half the learning rate, at most
    `recipe.halvings` times, and is then that of a recipe with this rate. It diverges when a loss or a score
    is no finite number; when an epoch falls back to guessing (`rankrl.training.chance`) after one that did
    better; and when the warm-up is over, or 100 steps done if that is later, no epoch did better, and the
    loss is above that of guessing. A network that merely waits on the plateau of guessing is left to it.

    Args:
        model: The network; it is moved to the device and left there, in evaluation mode.
        data: The dataset.
        recipe: How to train.
        precision: Device and precision; the fastest safe one when omitted.
        teacher: The network to distil from, moved to the device and run in evaluation mode; needed when
            `recipe.distillation` is above 0, not run otherwise.
        constraint: Pulls the network's weights towards what a plan can represent.
        state_file: A .safetensors file to which the state is written after every epoch.
        resume: Whether to go on from `state_file`; the result is that of an undisturbed run, bit for bit.
        on_step: Called every few steps and at the end of every epoch.

    Returns:
        The history, and which epoch's weights the network has.

    Raises:
        ConfigError: The recipe needs a teacher and has none, or the optimizer refuses its options.
        ModelError: The network does not fit the images or classes.
        CheckpointError: `state_file` cannot be resumed from.
        NonFiniteError: The loss or a class score became NaN or infinite, at the last of the rates too.
        StorageError: `state_file` cannot be written.
    """
    precision = inference_precision() if precision is None else precision
    path = None if state_file is None else Path(state_file)
    if recipe.distillation > 0 and (teacher is None or teacher is model):
        raise ConfigError("distillation above 0 needs a teacher: another network, usually the dense one")
    if resume and path is None:
        raise ConfigError("resuming needs the state_file of the run to resume")
    networks = [model] if recipe.distillation == 0 or teacher is None else [model, teacher]
    example = torch.zeros(2, *data.input_shape, device=precision.device)
    layouts = set()
    for network, name in zip(networks, ("the network", "the teacher"), strict=False):
        check_classifier(network.to(precision.device), data.input_shape, data.classes, name=name)
        layouts.add(to_fastest_layout(network, example))
    layout = torch.contiguous_format if torch.contiguous_format in layouts else torch.channels_last

    layers = factorised_layers(model).values()
    if recipe.balance_cores:
        for layer in layers:
            if not is_rounded(layer):
                layer.balance()
    state = TrainingState(model, recipe, _setup(data, recipe), constraint)
    if resume and path is not None:
        state.restore(path)

    fork = torch.random.fork_rng([precision.device] if precision.device.type == "cuda" else [])
    with fork, deterministic_kernels() if precision.device.type == "cuda" else nullcontext():
        teacher = networks[1] if len(networks) == 2 else None
        products = list(layers) if recipe.product_decay else []
        epochs = _Epochs(data, recipe, precision, layout, teacher, products, on_step)
        start = state.begin(epochs.score(model)) if state.start is None else state.start
        while len(state.history) < recipe.epochs and not _out_of_patience(state, recipe):
            try:
                epochs.run(state)
            except _DivergedError as error:
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
    model.load_state_dict(weights)
    for network in networks:
        network.to(memory_format=torch.contiguous_format)
        network.eval()
    return TrainingResult(
        tuple(state.history),
        start,
        row.epoch,
        row.accuracy,
        len(state.history) < recipe.epochs,
        state.lr,
        state.halvings,
    )


class _DivergedError(Exception):
    """The training diverged; the message says where and at which rate."""


@dataclass(frozen=True)
class _TrainedEpoch:
    """What the steps of an epoch brought.

    Attributes:
        loss: Mean loss.
        lr: Learning rate of the last step.
        guessing: Whether its answers were no better than guessing.
        worse: Whether its cross-entropy was above that of guessing.
    """

    loss: float
    lr: float
    guessing: bool
    worse: bool


class _Epochs:
    """Runs one epoch after the other on a `TrainingState`; holds what does not change between them."""

    def __init__(
        self,
        data: ImageData,
        recipe: TrainingRecipe,
        precision: Precision,
        layout: torch.memory_format,
        teacher: nn.Module | None,
        products: Sequence[FactorisedLayer],
        on_step: Callable[[TrainingProgress], None] | None,
    ) -> None:
        self.data = data
        self.products = products
        self.recipe = recipe
        self.precision = precision
        self.layout = layout
        self.teacher = None if teacher is None else teacher.eval()
        self.on_step = on_step
        self.train_images = _near(data.train, precision.device)
        self.heldout = _near(data.heldout, precision.device)
        self.batch_size = min(recipe.batch_size, len(data.train))
        self.steps = len(data.train) // self.batch_size

    def run(self, state: TrainingState) -> None:
        """Train for one epoch, score it, and add it to the history."""
        started = time.perf_counter()
        epoch = len(state.history) + 1
        trained = self._train_epoch(state, epoch)
        self._judge(state, epoch, trained)
        try:
            score = self.score(state.scored_model)
        except NonFiniteError as error:
            raise _DivergedError(
                f"after epoch {epoch} of training (learning rate {trained.lr:.3g}): {error}"
            ) from error
        row = EpochRow(epoch, trained.lr, trained.loss, score, time.perf_counter() - started)
        state.finish_epoch(row)
        if state.constraint is not None and epoch < self.recipe.epochs:
            state.constraint.end_epoch()
        self._report(state, epoch, epoch * self.steps, trained.lr, trained.loss, row)

    def score(self, model: nn.Module) -> float:
        """Return a network's accuracy on the held-out images."""
        mean, std = self.data.mean, self.data.std
        return accuracy(model, self.heldout, mean=mean, std=std, precision=self.precision)

    def _judge(self, state: TrainingState, epoch: int, trained: _TrainedEpoch) -> None:
        """Raise `_DivergedError` for an epoch of guessing while the rate can still be halved."""
        if not trained.guessing:
            state.learned = True
            return
        recipe, done = self.recipe, epoch * self.steps
        over = done >= max(recipe.warmup * recipe.epochs * self.steps, _FEWEST_STEPS_JUDGED)
        if state.halvings < recipe.halvings and (state.learned or (over and trained.worse)):
            what = "fell back to guessing" if state.learned else "had learned nothing"
            raise _DivergedError(
                f"the network {what} by the end of epoch {epoch} (training loss {trained.loss:.3g}, highest "
                f"learning rate {state.lr:.3g})"
            )

    def _train_epoch(self, state: TrainingState, epoch: int) -> _TrainedEpoch:
        """Take the steps of an epoch."""
        # Order, augmentation and dropout follow from the seed and the epoch alone: nothing to save.
        seed = int(np.random.SeedSequence((self.recipe.seed, epoch)).generate_state(1)[0])
        torch.manual_seed(seed)
        state.model.train()
        losses, entropies = torch.zeros(2, self.steps, device=self.precision.device)
        right = torch.zeros((), dtype=torch.int64, device=self.precision.device)
        lr = 0.0
        checked = 0
        walk = batches(
            self.train_images,
            self.batch_size,
            mean=self.data.mean,
            std=self.data.std,
            device=self.precision.device,
            augmentation=self.data.augmentation if self.recipe.augment else None,
            generator=torch.Generator().manual_seed(seed),
            shuffle=True,
            drop_last=True,
        )
        for step, (x, y) in enumerate(walk):
            done = (epoch - 1) * self.steps + step
            total = self.recipe.epochs * self.steps
            lr = state.lr * learning_rate_factor(self.recipe.schedule, done, total, self.recipe.warmup)
            losses[step], scores = self._step(state, in_layout(x, self.layout), y, lr)
            entropies[step] = F.cross_entropy(scores, y)
            right += (scores.argmax(1) == y).sum()
            if step + 1 - checked >= _STEPS_BETWEEN_CHECKS or step + 1 == self.steps:
                mean_loss = self._check(losses, checked, step + 1, epoch, state.lr)
                checked = step + 1
                if checked < self.steps:
                    self._report(state, epoch, done + 1, lr, mean_loss)
        images = self.steps * self.batch_size
        entropy, labels = float(entropies.mean()), self.train_images.y
        guessing = is_guessing(int(right) / images, entropy, labels, images)
        return _TrainedEpoch(float(losses.mean()), lr, guessing, worse_than_guessing(entropy, labels))

    def _step(self, state: TrainingState, x: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Return the loss and the class scores of one step, which has been taken."""
        recipe = self.recipe
        with self.precision.autocast():
            scores = state.model(x)
            taught = None
            if self.teacher is not None:
                with torch.no_grad():
                    taught = self.teacher(x)
        loss = training_loss(
            scores,
            y,
            taught,
            label_smoothing=recipe.label_smoothing,
            distillation=recipe.distillation,
            temperature=recipe.temperature,
        )
        if self.products:
            norms = torch.stack([layer.squared_norm() for layer in self.products])
            loss = loss + recipe.product_decay / 2 * norms.sum()
        if state.constraint is not None:
            loss = loss + state.constraint.penalty()
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if recipe.gradient_clip is not None:
            nn.utils.clip_grad_norm_(state.model.parameters(), recipe.gradient_clip)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step()
        if state.average is not None:
            state.average.update_parameters(state.model)
        return loss.detach(), scores.detach().float()

    def _check(self, losses: Tensor, start: int, stop: int, epoch: int, highest: float) -> float:
        """Return the mean loss of steps `start` to `stop` (excluded), all of which must be finite."""
        recent = losses[start:stop].tolist()
        for step, loss in enumerate(recent, start):
            if not np.isfinite(loss):
                done, total = (epoch - 1) * self.steps + step, self.recipe.epochs * self.steps
                factor = learning_rate_factor(self.recipe.schedule, done, total, self.recipe.warmup)
                raise _DivergedError(
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


def _out_of_patience(state: TrainingState, recipe: TrainingRecipe) -> bool:
    best = state.best_row
    if recipe.early_stop_patience is None or best is None:
        return False
    return len(state.history) - best.epoch >= recipe.early_stop_patience


def _near(images: Images, device: torch.device) -> Images:
    """Return the images on the device when they take at most half of its free memory, else as they are."""
    if device.type != "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.x.numel() <= free // 2 else images


def _setup(data: ImageData, recipe: TrainingRecipe) -> dict[str, object]:
    """Return what must be equal for two runs to be the same run."""
    recipe_values = asdict(recipe)
    recipe_values["optimizer_options"] = dict(recipe.optimizer_options)
    return {
        "dataset": data.name,
        "training images": len(data.train),
        "held-out images": len(data.heldout),
        "classes": data.classes,
        **recipe_values,
    }
