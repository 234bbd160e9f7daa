"""Options of the pruners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rankrl.errors import ConfigError
from rankrl.options.scores import check_choice

Scope = Literal["uniform", "global", "per_cost"]


@dataclass(frozen=True)
class BlockOptions:
    """Options of what removes whole blocks.

    Attributes:
        layers: Names of the layers whose channels, or blocks, may go; None for all that can be pruned.
    """

    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CriterionOptions(BlockOptions):
    """Options of a criterion, whose scores are compared.

    Attributes:
        scope: `uniform` keeps the same share of every channel group, `global` ranks all channels together,
            `per_cost` by what they save (see `pruning.keep_within`); None takes `per_cost` for
            reconstruction, `uniform` for the others.
        multiple: Channels are kept in multiples of it; processors compute several at a time.
    """

    scope: Scope | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.scope is not None:
            check_choice("pruner.scope", self.scope, Scope)
        if self.multiple < 1:
            raise ConfigError(f"pruner.multiple must be at least 1, got {self.multiple}")


@dataclass(frozen=True)
class NetworkSteps:
    """How the network learns while its masks do.

    Attributes:
        batch_size: Images in a step.
        lr: Learning rate of Adam for the network's parameters.
        mask_lr: Learning rate of Adam for the masks' parameters; None for each mask's own, faster in short
            trainings.
        augment: Whether training images are cropped and flipped at random.
    """

    # A mask knows the rate that suits how it is parametrised; datasets say how they are augmented.
    PYTHON_ONLY = ("mask_lr", "augment")

    batch_size: int = 128
    lr: float = 1e-3
    mask_lr: float | None = None
    augment: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"pruner.batch_size must be at least 1, got {self.batch_size}")
        for name in ("lr", "mask_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"pruner.{name} must be positive, got {value}")


@dataclass(frozen=True)
class MaskOptions(NetworkSteps, BlockOptions):
    """Options of a mask that is trained; what else `pruning.MaskTrainingOptions` has, has its defaults.

    Attributes:
        epochs: Epochs of the pruning phase, in which the masks learn.
        strength: Factor of the mask penalty (summed over all units); where it starts, if there is a target.
        strengths: Further factors for single groups, by group name (per-branch strengths).
        limit: Share of each group's units that may remain at most when the masks are fixed (hard limit); None
            for no limit.
        rewind: Keep what the masks chose and go back to the dense network's weights, solved for again like
            those that a criterion leaves; None for whichever weights do better on held-out images.
    """

    epochs: int = 10
    strength: float = 1e-3
    strengths: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    rewind: bool | None = None


PRUNERS: dict[str, type] = {
    "apoz": CriterionOptions,
    "blocks": BlockOptions,
    "first_k": CriterionOptions,
    "group_lasso": MaskOptions,
    "hard_concrete": MaskOptions,
    "magnitude": CriterionOptions,
    "random": CriterionOptions,
    "reconstruction": CriterionOptions,
}
"""Options by the pruner's name."""
