"""Run the epochs of a training, save its state between them, and replay steps from a CUDA graph."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from decomposition import FactorisedLayer, Inputs, factorised_layers, run_model
from decomposition.network.rounding import is_rounded
from rankrl.device import Precision
from rankrl.errors import CheckpointError, ConfigError, NonFiniteError
from rankrl.state_file import check_setup, read_state, write_state
from rankrl.training.recipe import TrainingRecipe, WeightAverage, build_optimizer, learning_rate_factor

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


log = logging.getLogger(__name__)

# Beside the largest weight of a tensor, these vanish in any float32 sum: its resolution is 6e-8.
_NEGLIGIBLE = 1e-10


@contextmanager
def subnormals_as_zero() -> Iterator[None]:
    """Flush subnormal operands and results to zero on the calling thread.

    Threads that PyTorch starts in this context do so, too; those already running do not, so the command line
    enters it first of all. Processors that cannot flush them compute as before.
    """
    if not torch.full((1,), 1e-39).mul(0.5).any():  # 1e-39 is subnormal in float32
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@torch.no_grad()
def clear_negligible(model: nn.Module) -> None:
    """Set weights to zero, in place, that are at most 1e-10 times the largest of their tensor."""
    for weights in model.parameters():  # products with them may be subnormal, which is slow
        if weights.is_floating_point() and weights.numel():
            size = weights.abs()
            weights.masked_fill_(size <= _NEGLIGIBLE * size.amax(), 0.0)


Pass = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From inputs and labels to loss and outputs; adds the gradients to the parameters' `.grad`."""

# PyTorch requires runs on a side stream before a capture: libraries allocate handles and workspaces there.
_WARM_UPS = 2


class CannotCaptureError(Exception):
    """A pass cannot be replayed from a graph; the message says why."""


class GraphedPass:
    """A pass that is captured once and then replayed, for batches of one shape.

    Results are equal. Buffers and PyTorch's random generators stay as they were, even where capturing fails.
    """

    def __init__(self, compute: Pass, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x.clone(), y.clone()
        self._graph = torch.cuda.CUDAGraph()
        buffers = dict(model.named_buffers())
        values = {name: buffer.clone() for name, buffer in buffers.items()}
        current, stream = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        stream.wait_stream(current)
        try:
            with torch.random.fork_rng([x.device]):
                self._warm_up(compute, model, stream)
                if any(buffers.get(name) is not buffer for name, buffer in model.named_buffers()):
                    raise CannotCaptureError("it replaces its buffers")
                # With no gradients before it, the captured backward pass overwrites instead of accumulating.
                model.zero_grad(set_to_none=True)
                with torch.cuda.device(x.device), torch.cuda.graph(self._graph, stream=stream):
                    self._loss, self._outputs = compute(self._x, self._y)
            self._gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
        finally:
            current.wait_stream(stream)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in values:
                        buffer.copy_(values[name])
            model.zero_grad(set_to_none=True)

    def _warm_up(self, compute: Pass, model: nn.Module, stream: torch.cuda.Stream) -> None:
        """Run the pass as often as a capture requires, and check that it can be captured."""
        device, host = self._x.device, _host_randomness()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                model.zero_grad(set_to_none=True)
                compute(self._x, self._y)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            # A failed capture leaves PyTorch's generators unusable, so its causes are looked for first.
            with _refusing_to_wait():
                compute(self._x, self._y)
        if host != _host_randomness():
            raise CannotCaptureError("it draws random numbers on the host")
        torch.cuda.empty_cache()
        if torch.cuda.max_memory_allocated(device) - held > torch.cuda.mem_get_info(device)[0] / 2:
            raise CannotCaptureError("it needs more than half of the free memory, which a graph keeps")

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's loss and outputs, which the next call overwrites; gradients are in `.grad`."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss, self._outputs


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise `CannotCaptureError` if code in the block synchronises with the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise CannotCaptureError(f"its code waits for the device ({error})") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _host_randomness() -> tuple[Any, ...]:
    """Return the states of the host's random generators, in comparable form."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


_ADVICE = "Lower the learning rate, lengthen the warm-up, or set gradient_clip."
# Reading a loss makes the host wait for a GPU; doing so rarely keeps the GPU busy.
_STEPS_BETWEEN_CHECKS = 25


@dataclass(frozen=True)
class TrainingProgress:
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
    history: tuple[EpochRow, ...]
    start: float
    epoch: int
    accuracy: float
    stopped_early: bool
    lr: float
    halvings: int

    @property
    def numbers(self) -> dict[str, float]:
        """The entry of metrics.json: highest rate, epochs, and the one whose weights were taken, from 0."""
        return {"lr": self.lr, "halvings": self.halvings, "epochs": len(self.history), "epoch": self.epoch}


class DivergedError(Exception):
    """The training diverged; the message says where and at which rate."""


@dataclass(kw_only=True)
class Epochs:
    """Runs epochs on a `TrainingState`; holds everything that does not change between them.

    Attributes:
        batches: From a seed to the batches of inputs and labels of an epoch, in an order that it gives.
        loss: From outputs, labels and the teacher's outputs, or None, to the loss of a step.
        score: The score of a network on the held-out inputs; higher is better.
    """

    recipe: TrainingRecipe
    precision: Precision
    batches: Callable[[int], Iterator[tuple[Inputs, Any]]]
    loss: Callable[[Any, Any, Any], Tensor]
    score: Callable[[nn.Module], float]
    steps: int
    teacher: nn.Module | None
    products: Sequence[FactorisedLayer]
    on_step: Callable[[TrainingProgress], None] | None

    def __post_init__(self) -> None:
        if self.teacher is not None:
            self.teacher.eval()

    def watch(self, outputs: Any, labels: Any) -> None:
        """Record statistics of a batch's outputs, before the optimizer's step."""

    def judge(self, state: TrainingState, epoch: int, loss: float) -> None:
        """Raise `DivergedError` if an epoch with this mean loss has led nowhere."""
        state.learned = True

    def run(self, state: TrainingState) -> None:
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
def follow(state: TrainingState, epochs: Epochs, path: Path | None = None) -> TrainingResult:
    """Train to the last epoch, or until patience ends, and load the weights that the recipe returns."""
    recipe, device = epochs.recipe, epochs.precision.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        start = state.begin(epochs.score(state.model)) if state.start is None else state.start
        while len(state.history) < recipe.epochs and not _out_of_patience(state, recipe):
            _run_or_halve(state, epochs)
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


def _run_or_halve(state: TrainingState, epochs: Epochs) -> None:
    """Run an epoch; start again with half the rate where it diverges."""
    try:
        epochs.run(state)
    except DivergedError as error:
        if state.halvings == epochs.recipe.halvings:
            raise NonFiniteError(f"{error}. {_ADVICE}") from error
        state.start_again()
        log.warning(
            "%s; the training starts again with half the highest rate, %.3g (halving %d of %d)",
            error,
            state.lr,
            state.halvings,
            epochs.recipe.halvings,
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
