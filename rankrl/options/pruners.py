"""Options of the pruners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pruning.errors import PruningError

Scope = Literal["uniform", "global", "per_cost"]


@dataclass(frozen=True)
class BlockOptions:
    """Options of what removes whole blocks."""

    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CriterionOptions(BlockOptions):
    """Options of a criterion, whose scores are compared."""

    scope: Scope = "uniform"
    multiple: int = 1


@dataclass(frozen=True)
class ReconstructionOptions(CriterionOptions):
    """Options of `reconstruction`."""

    scope: Scope = "per_cost"


@dataclass(frozen=True)
class NetworkSteps:
    """How the network learns beside its masks.

    Attributes:
        batch_size: Images in a step.
        lr: Learning rate of Adam for the network's parameters.
        mask_lr: Learning rate of Adam for the masks' parameters; None for each mask's own, faster in short
            trainings.
        augment: Whether training images are cropped and flipped at random.
    """

    batch_size: int = 128
    lr: float = 1e-3
    mask_lr: float | None = None
    augment: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise PruningError(f"batch_size must be at least 1, got {self.batch_size}")
        for name in ("lr", "mask_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise PruningError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class MaskOptions(NetworkSteps, BlockOptions):
    """Options of a mask that is trained."""

    rewind: bool | None = None
    epochs: int = 10
    settling_epochs: int = 0
    strength: float = 1e-3
    strengths: Mapping[str, float] = field(default_factory=dict)
    l1: float = 0.0
    l2: float = 1e-4
    unit_norm: bool = True
    push_pull: tuple[int, int] = (0, 0)
    trap_threshold: float | None = 0.05
    limit: float | None = None
    checks_per_epoch: int = 4


@dataclass(frozen=True)
class GroupLassoOptions(MaskOptions):
    """Options of `group_lasso`."""

    initial: float = 1.0


@dataclass(frozen=True)
class HardConcreteOptions(MaskOptions):
    """Options of `hard_concrete`."""

    initial_log_alpha: float = 2.5
    gamma: float = -0.1
    zeta: float = 1.1
    parametrisation: Literal["log_alpha", "alpha"] = "log_alpha"
    penalty_function: Literal["sigmoid", "hard_sigmoid"] = "sigmoid"
    temperature: tuple[float, float] = (0.2, 0.05)


PRUNERS: dict[str, type] = {
    "apoz": CriterionOptions,
    "blocks": BlockOptions,
    "first_k": CriterionOptions,
    "group_lasso": GroupLassoOptions,
    "hard_concrete": HardConcreteOptions,
    "magnitude": CriterionOptions,
    "random": CriterionOptions,
    "reconstruction": ReconstructionOptions,
}
"""Options by the pruner's name."""
