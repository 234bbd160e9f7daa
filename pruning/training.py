"""Train masks: the schedule, the strength of the penalty, and a state to resume from exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from pruning.copies import public_call
from pruning.errors import PruningError
from pruning.masked_network import MaskedNetwork
from pruning.masks import ChannelMask, HardConcreteMask
from pruning.selection import Cost, keep_within, require_reachable


def linear(start: float, end: float, progress: float) -> float:
    """Interpolate linearly from `start` (at progress 0) to `end` (at progress 1 and beyond)."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


@dataclass(frozen=True)
class PushPull:
    """Alternate between steps of the network's weights and steps of the masks.

    Attributes:
        network_steps: steps in which only the network learns.
        mask_steps: steps after them in which only the masks learn; with 0 for both, all learn in every step.

    Raises:
        PruningError: if only one of the numbers is zero, or one is negative.
    """

    network_steps: int = 0
    mask_steps: int = 0

    def __post_init__(self) -> None:
        together = self.network_steps == self.mask_steps == 0
        if not together and min(self.network_steps, self.mask_steps) < 1:
            raise PruningError(
                f"push-pull needs at least one step for each side, got {self.network_steps} for the network "
                f"and {self.mask_steps} for the masks (0 and 0 train both in every step)"
            )

    def turns(self, step: int) -> tuple[bool, bool]:
        """Return whether the network and whether the masks learn in `step` (counted from 0)."""
        if self.network_steps == 0:
            return True, True
        network = step % (self.network_steps + self.mask_steps) < self.network_steps
        return network, not network


class StrengthController:
    """Adapts the strength of the penalty so that the gates close along a line, without tuning.

    A proportional-integral controller on the logarithm of the strength. The line leads to no gates at all at
    the end of the pruning phase; the training leaves it where the cost of the network reaches its target. It
    watches the soft measure of openness that the penalty itself lowers: the cost of the network answers too
    late, because gates move long before they close.

    Args:
        strength: the strength to start from, positive.
        proportional: gain on the present deviation from the line.
        integral: gain on the deviation summed over the training progress.

    Raises:
        PruningError: if the strength is not positive and finite.
    """

    LARGEST_CHANGE = math.log(1e4)
    """The strength stays within this factor (in logarithm) of the one it starts from."""

    def __init__(self, strength: float, proportional: float = 10.0, integral: float = 50.0) -> None:
        if not (math.isfinite(strength) and strength > 0):
            raise PruningError(f"the strength to start from must be positive and finite, got {strength}")
        self.start = strength
        self.proportional, self.integral = proportional, integral
        self._sum = 0.0
        self._progress = 0.0

    def state(self) -> list[float]:
        """Return the controller's state, for `restore`."""
        return [self._sum, self._progress]

    def restore(self, state: Sequence[float]) -> None:
        """Restore a `state`."""
        self._sum, self._progress = state

    def update(self, openness: float, progress: float) -> float:
        """Return the strength for the next step.

        Args:
            openness: the present penalty as a fraction of the initial one.
            progress: through the pruning phase, in [0, 1].
        """
        deviation = openness - linear(1.0, 0.0, progress)
        change = self._sum + self.integral * deviation * (progress - self._progress)
        self._sum = min(max(change, -self.LARGEST_CHANGE), self.LARGEST_CHANGE)
        self._progress = progress
        exponent = min(
            max(self._sum + self.proportional * deviation, -self.LARGEST_CHANGE), self.LARGEST_CHANGE
        )
        return self.start * math.exp(exponent)


@dataclass(frozen=True)
class MaskTrainingOptions:
    """Options of mask training.

    Attributes:
        epochs: epochs of the pruning phase, in which the masks learn.
        settling_epochs: epochs after it, with the masks fixed.
        strength: factor of the mask penalty (summed over all units); where it starts, if there is a target.
        strengths: further factors for single groups, by group name (per-branch strengths).
        l1: factor of the sum of absolute values of all weight matrices and kernels of the network.
        l2: factor of the sum of their squares. Without a penalty or `unit_norm` a ReLU network rescales its
            weights around the masks.
        unit_norm: hold the norm of the weights that read each unit (see `MaskedNetwork.constrain_norms`).
        push_pull: steps of the network alone, then of the masks alone; (0, 0) trains both in every step.
        trap_threshold: a mask value below it is set to zero and stays zero; None sets none
            to zero before the end.
        limit: share of each group's units that may remain at most when the masks are fixed (hard limit); None
            for no limit.
        temperature: temperature of hard-concrete masks at the start and at the end of the pruning phase,
            annealed linearly.
        checks_per_epoch: how often the cost is compared with the target and the strength adapted.
    """

    epochs: int = 10
    settling_epochs: int = 0
    strength: float = 1e-3
    strengths: Mapping[str, float] = field(default_factory=dict)
    l1: float = 0.0
    l2: float = 1e-4
    unit_norm: bool = True
    push_pull: PushPull = field(default_factory=PushPull)
    trap_threshold: float | None = 0.05
    limit: float | None = None
    temperature: tuple[float, float] = (0.2, 0.05)
    checks_per_epoch: int = 4

    def __post_init__(self) -> None:
        for name in ("epochs", "checks_per_epoch"):
            if getattr(self, name) < 1:
                raise PruningError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("settling_epochs", "strength", "l1", "l2"):
            if not getattr(self, name) >= 0:
                raise PruningError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.trap_threshold is not None and not self.trap_threshold >= 0:
            raise PruningError(f"trap_threshold must be at least 0 or None, got {self.trap_threshold}")
        if self.limit is not None and not 0 < self.limit <= 1:
            raise PruningError(f"limit must lie in (0, 1] or be None, got {self.limit}")
        if not min(self.temperature) > 0:
            raise PruningError(f"temperature must be positive at both ends, got {self.temperature}")


@dataclass(frozen=True)
class MaskEpoch:
    """The report of one epoch of mask training.

    Attributes:
        epoch: counted from 0 over both phases.
        loss: mean task loss (without penalties) over the epoch.
        strength: of the mask penalty at the end of the epoch, 0 once the masks are fixed.
        open_fraction: share of the masked units that are open.
        cost_fraction: share of the cost that they make up; None without a cost.
    """

    epoch: int
    loss: float
    strength: float
    open_fraction: float
    cost_fraction: float | None


@dataclass(frozen=True)
class QualityJump:
    """The quality of the masked network around the moment at which its masks are fixed.

    Attributes:
        sampled: with gates sampled as in training.
        deterministic: with the deterministic gates.
        fixed: after trapping, limits and binarisation: the quality of the network with its channels removed.
    """

    sampled: float
    deterministic: float
    fixed: float


@dataclass(frozen=True)
class MaskTrainingResult:
    """The history of a mask training, and the quality jump if an evaluation was given."""

    epochs: list[MaskEpoch]
    jump: QualityJump | None


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


Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Evaluation = Callable[[nn.Module], float]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeContext = Callable[[], AbstractContextManager[Any]]

FULL_PHASE = 250
"""Steps of a pruning phase in which a mask at its own learning rate gets everywhere that it has to."""


class Batches(Protocol):
    """One epoch of (inputs, targets) every time it is iterated, such as a DataLoader or a list."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch."""


def adam(learning_rate: float) -> MakeOptimizer:
    """Return a maker of Adam optimizers without weight decay."""
    return lambda parameters: torch.optim.Adam(parameters, lr=learning_rate)


@public_call
def train_masks(
    masked: MaskedNetwork,
    batches: Batches,
    loss: Loss,
    options: MaskTrainingOptions,
    *,
    network_optimizer: MakeOptimizer | None = None,
    mask_optimizer: MakeOptimizer | None = None,
    cost: Cost | None = None,
    target: float | None = None,
    evaluate: Evaluation | None = None,
    autocast: MakeContext = nullcontext,
    on_epoch: Callable[[MaskEpoch], None] | None = None,
    start: MaskTrainingState | None = None,
    on_state: Callable[[MaskTrainingState], None] | None = None,
) -> MaskTrainingResult:
    """Train network and masks, then fix the masks.

    With a target, the strength of the penalty adapts so that the cost of the network falls to it during the
    pruning phase, and the masks are fixed as soon as it is reached; what closed last is opened again as far
    as the target allows. If it is not reached in time, the weakest units over all groups are closed until it
    is. `masked.removed()` is the smaller network afterwards, to be fine-tuned.

    Args:
        masked: the network, changed in place.
        batches: an epoch of (inputs, targets) every time it is iterated.
        loss: the task loss of outputs and targets, a scalar.
        options: the schedule.
        network_optimizer: makes the optimizer of the network's parameters; Adam at 0.001 if None.
        mask_optimizer: makes the optimizer of the masks' parameters; Adam at each mask's
            own learning rate if None, or at a higher one if the pruning phase is shorter than `FULL_PHASE`.
        cost: the cost of a plain network, such as its MACs.
        target: the fraction of the cost to keep, in (0, 1); needs `cost`.
        evaluate: the quality of a network, measured before and after the masks are fixed.
        autocast: makes the context in which forward passes and losses are computed, such as
            `torch.autocast`.
        on_epoch: is called after every epoch.
        start: the state to go on from, of a training with the same arguments.
        on_state: is called with the state after every epoch.

    Raises:
        PruningError: if the target cannot be reached, the loss or a gate is not finite, or there is no batch.
    """
    if len(batches) == 0:
        raise PruningError("there are no batches to train the masks on")
    if target is not None and (cost is None or not 0 < target < 1):
        raise PruningError(f"the target is a fraction of `cost` in (0, 1), got {target} of {cost}")
    if target is not None and cost is not None:
        require_reachable(masked.folded(), masked.example_input, masked.groups, cost, target)
    if options.unit_norm:
        masked.constrain_norms()
    training = _MaskTraining(masked, loss, options, cost, target, evaluate, autocast)
    training.network_optimizer = (network_optimizer or adam(1e-3))(masked.network_parameters())
    training.mask_optimizer = (
        mask_optimizer(masked.mask_parameters())
        if mask_optimizer is not None
        else _adam_of_masks(masked, options.epochs * len(batches))
    )
    history: list[MaskEpoch] = []
    if start is not None:
        training.restore(start)
        history = start.epochs
    for epoch in range(len(history), options.epochs + options.settling_epochs):
        mean_loss = training.run_epoch(batches, epoch)
        if epoch + 1 >= options.epochs:
            training.fix()
        record = MaskEpoch(
            epoch, mean_loss, training.strength, masked.open_fraction(), training.cost_fraction()
        )
        history.append(record)
        if on_epoch is not None:
            on_epoch(record)
        if on_state is not None:
            on_state(training.state(history))
    return MaskTrainingResult(history, training.jump)


def _adam_of_masks(masked: MaskedNetwork, steps: int) -> torch.optim.Optimizer:
    masks = [mask for mask in masked.masks if isinstance(mask, ChannelMask)]
    haste = max(1.0, FULL_PHASE / steps)
    return torch.optim.Adam([{"params": list(m.parameters()), "lr": haste * m.learning_rate} for m in masks])


class _MaskTraining:
    """The state of one mask training."""

    network_optimizer: torch.optim.Optimizer
    mask_optimizer: torch.optim.Optimizer

    def __init__(
        self,
        masked: MaskedNetwork,
        loss: Loss,
        options: MaskTrainingOptions,
        cost: Cost | None,
        target: float | None,
        evaluate: Evaluation | None,
        autocast: MakeContext,
    ) -> None:
        self.masked, self.loss, self.options = masked, loss, options
        self.cost, self.target, self.evaluate = cost, target, evaluate
        self.autocast = autocast
        self.full_cost = cost(masked.folded()) if cost is not None else None
        self.controller = StrengthController(options.strength) if target is not None else None
        self.strength = options.strength
        self._set_temperature(options.temperature[0])
        self.full_penalty = float(masked.penalty().detach())
        self.jump: QualityJump | None = None
        self.fixed = False
        self.step = 0
        # Cache of the last cost and the open units it was measured with.
        self._measured: tuple[torch.Tensor, float] | None = None
        self.scores_before = masked.scores()
        # Matrices and kernels only: biases and batch norms do not rescale around a mask.
        self.weights = [parameter for parameter in masked.network_parameters() if parameter.ndim > 1]

    def run_epoch(self, batches: Batches, epoch: int) -> float:
        """Train for one epoch and return the mean task loss."""
        total = 0.0
        for number, (inputs, targets) in enumerate(batches):
            progress = (epoch + number / len(batches)) / self.options.epochs
            total += self.train_step(inputs, targets, progress)
            checks = self.options.checks_per_epoch
            if (number + 1) * checks // len(batches) > number * checks // len(batches):
                self.check()
        return total / len(batches)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor, progress: float) -> float:
        """Take one step of the network, of the masks, or of both, and return the task loss."""
        masked, options = self.masked, self.options
        network_turn, mask_turn = (True, False) if self.fixed else options.push_pull.turns(self.step)
        self.step += 1
        self._set_temperature(linear(*options.temperature, progress))
        if mask_turn and self.controller is not None:
            openness = float(self.masked.penalty().detach()) / self.full_penalty
            self.strength = self.controller.update(openness, progress)
        masked.train()
        with self.autocast():
            task_loss = self.loss(masked(inputs), targets)
        if not torch.isfinite(task_loss):
            raise PruningError(
                f"the loss is {float(task_loss.detach())} in step {self.step}; lower the learning rates"
            )
        objective = task_loss
        if network_turn:
            objective = objective + self._weight_penalty()
        if mask_turn:
            objective = objective + self.strength * masked.penalty(options.strengths)
        masked.zero_grad(set_to_none=True)
        objective.backward()
        if network_turn:
            self.network_optimizer.step()
        if mask_turn:
            self.mask_optimizer.step()
        if not self.fixed:
            if options.unit_norm:
                masked.project_norms()
            if mask_turn and options.trap_threshold is not None:
                masked.trap(options.trap_threshold)
        return float(task_loss.detach())

    def check(self) -> None:
        """Fix the masks if the cost has reached the target."""
        if self.fixed or self.target is None:
            return
        fraction = self.cost_fraction()
        if fraction is not None and fraction <= self.target:
            self.fix()
        else:
            self.scores_before = self.masked.scores()

    def fix(self) -> None:
        """Close units down to the target and the limit, freeze the masks and measure the jump in quality."""
        if self.fixed:
            return
        masked = self.masked
        sampled = deterministic = None
        if self.evaluate is not None:
            with masked.sampled_gates():
                sampled = self.evaluate(masked)
            deterministic = self.evaluate(masked)
        self._meet_target()
        if self.options.limit is not None:
            masked.limit(self.options.limit)
        masked.freeze()
        self.fixed = True
        self.strength = 0.0
        if self.evaluate is not None and sampled is not None and deterministic is not None:
            self.jump = QualityJump(sampled, deterministic, self.evaluate(masked))

    def _meet_target(self) -> None:
        """Close the weakest units if the cost is above the target, or reopen units closed in excess."""
        if self.cost is None or self.target is None:
            return
        masked = self.masked
        opened = masked.open_units()
        above = 1 + max(float(scores.max()) for scores in self.scores_before.values())
        scores = {
            name: torch.where(opened[name], above + row, self.scores_before[name])
            for name, row in masked.scores().items()
        }
        kept = keep_within(
            masked.folded(), masked.example_input, masked.groups, scores, self.cost, self.target, "global"
        )
        units = {group.name: group.units_of(kept) for group in masked.groups}
        masked.reopen(units)
        masked.keep(units)

    def cost_fraction(self) -> float | None:
        """Return the share of the cost that the open channels make up, None without a cost."""
        if self.cost is None or self.full_cost is None:
            return None
        opened = torch.cat(list(self.masked.open_units().values()))
        if self._measured is None or not torch.equal(self._measured[0], opened):
            self._measured = opened, self.cost(self.masked.removed()) / self.full_cost
        return self._measured[1]

    def state(self, history: list[MaskEpoch]) -> MaskTrainingState:
        """Return the state from which `restore` continues after the epochs of `history`."""
        tensors = {f"masked.{key}": value for key, value in self.masked.state_dict().items()}
        values: dict[str, Any] = {
            "epochs": [asdict(epoch) for epoch in history],
            "jump": None if self.jump is None else asdict(self.jump),
            "fixed": self.fixed,
            "step": self.step,
            "strength": self.strength,
            "full_penalty": self.full_penalty,
            "full_cost": self.full_cost,
            "controller": None if self.controller is None else self.controller.state(),
        }
        for name, optimizer in self._optimizers().items():
            own, values[name] = optimizer_state(optimizer, name)
            tensors |= own
        tensors |= {f"scores.{name}": scores for name, scores in self.scores_before.items()}
        if self.masked.radii is not None:
            tensors["radii"] = self.masked.radii
        return MaskTrainingState(tensors, values)

    def restore(self, state: MaskTrainingState) -> None:
        """Restore a `state`."""
        values = state.values
        try:
            self.masked.load_state_dict(part(state.tensors, "masked."))
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise PruningError(
                f"the state of the mask training belongs to another network ({first}); start anew"
            ) from error
        for name, optimizer in self._optimizers().items():
            restore_optimizer(optimizer, name, state.tensors, values[name])
        device = self.masked.example_input.device
        self.scores_before = {name: row.to(device) for name, row in part(state.tensors, "scores.").items()}
        if "radii" in state.tensors:
            self.masked.radii = state.tensors["radii"].to(device)
        if self.controller is not None and values["controller"] is not None:
            self.controller.restore(values["controller"])
        self.jump = None if values["jump"] is None else QualityJump(**values["jump"])
        self.fixed, self.step, self.strength = values["fixed"], values["step"], values["strength"]
        self.full_penalty, self.full_cost = values["full_penalty"], values["full_cost"]
        if self.fixed:
            self.masked.freeze()

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"network_optimizer": self.network_optimizer, "mask_optimizer": self.mask_optimizer}

    def _set_temperature(self, temperature: float) -> None:
        for mask in self.masked.masks:
            if isinstance(mask, HardConcreteMask):
                mask.set_temperature(temperature)

    def _weight_penalty(self) -> torch.Tensor:
        penalty = self.weights[0].new_zeros(())
        for weight in self.weights:
            if self.options.l1 > 0:
                penalty = penalty + self.options.l1 * weight.abs().sum()
            if self.options.l2 > 0:
                penalty = penalty + self.options.l2 * weight.square().sum()
        return penalty
