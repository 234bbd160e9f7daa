"""Define the options and the reports of mask training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pruning.errors import PruningError
from pruning.schedule import PushPull


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
