"""Schedule mask training: alternation of network and masks, temperature, strength of the penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pruning.errors import PruningError


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
