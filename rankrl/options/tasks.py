"""Options of single tasks: calibration, pruning, comparisons, tracking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankrl.errors import ConfigError
from rankrl.options.search import BudgetOptions


@dataclass(frozen=True)
class CalibrationOptions:
    """The training images that layers are fitted on.

    Attributes:
        images: How many. More than 1,000 rarely help.
    """

    images: int = 768

    def __post_init__(self) -> None:
        check_calibration(self.images)


@dataclass(frozen=True)
class PruneOptions:
    """Steps of task=prune once budget.params or budget.macs is reached (0.5 of the MACs if neither is set).

    Attributes:
        decompose_params: Decompose what is left (decomposition, selector, search) to this fraction of its
            parameters; None does not.
        decompose_macs: The same for its multiply-accumulates.
        finetune_epochs: Epochs of fine-tuning before the decomposition; None takes finetune.epochs, 0 is
            none.
    """

    decompose_params: float | None = None
    decompose_macs: float | None = None
    finetune_epochs: int | None = None

    def __post_init__(self) -> None:
        if self.decompose_params is not None and self.decompose_macs is not None:
            raise ConfigError("set prune.decompose_params or prune.decompose_macs, not both")
        for name in ("decompose_params", "decompose_macs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(
                    f"prune.{name}={value} is outside (0, 1); it is the fraction of the pruned network to "
                    "keep"
                )
        if self.finetune_epochs is not None and self.finetune_epochs < 0:
            raise ConfigError(
                f"prune.finetune_epochs must be a whole number >= 0, got {self.finetune_epochs}; 0 "
                "decomposes the pruned network as it is"
            )

    @property
    def budget(self) -> BudgetOptions | None:
        """Fractions of the pruned network that the decomposition keeps; None where there is none."""
        if self.decompose_params is None and self.decompose_macs is None:
            return None
        return BudgetOptions(params=self.decompose_params, macs=self.decompose_macs)


@dataclass(frozen=True)
class InspectOptions:
    """Columns that task=inspect adds to every layer's shape, cost and feasible ranks.

    Attributes:
        errors: Fit every layer at a few ranks on the calibration images and show what they cost and lose.
    """

    errors: bool = False


@dataclass(frozen=True)
class TimingOptions:
    """Where the times of a budget in time come from.

    Attributes:
        table: The times.json that the kit of task=timing_kit measured on another device, for which plans are
            then searched; or a list of it and of those that kits of task=verify_kit measured there, whose
            times of whole networks correct those of layers. None times on this machine.
    """

    table: str | Path | tuple[str | Path, ...] | None = None


@dataclass(frozen=True)
class CompareOptions:
    """Selectors and seeds of task=compare, on the same evaluator with search.episodes evaluations each.

    Selectors that are not random run once. finetune.epochs=0 leaves out fine-tuning.

    Attributes:
        selectors: Their names. Each has its own defaults; the one that `selector` names has those of the
            configuration. "NAME:OPTION=VALUE,OPTION=VALUE" sets options of one entry, so that a selector may
            enter several times: [bayes, "bayes:step=0.2"].
        seeds: The seeds that each runs with.
        apply: Apply, refit, test and fine-tune the plan of every search; false stops at the searches' scores.
        latex: Write the table of means as compare.tex (booktabs) and the curves as plots/rewards.pdf, too.
    """

    selectors: tuple[str, ...] = (
        *("bayes", "ddpg", "tpe", "cmaes", "local", "random"),
        *("greedy", "energy", "vbmf", "uniform"),
    )
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    apply: bool = True
    latex: bool = False


@dataclass(frozen=True)
class TrackingOptions:
    """Where the run is tracked as it proceeds.

    Attributes:
        name: A registered tracker.
        options: Its own options.
    """

    name: str = "tensorboard"
    options: Mapping[str, Any] = field(default_factory=dict)


def check_calibration(count: int) -> None:
    """Refuse a number of calibration images."""
    if count < 1:
        raise ConfigError(f"calibration.images must be at least 1, got {count}")
