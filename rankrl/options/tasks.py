"""Options of single tasks: calibration, export, pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rankrl.errors import ConfigError
from rankrl.options.search import BudgetOptions, ScoreMetric, check_choice, check_fractions
from rankrl.options.selectors import IMPORTANCE_SCALE, check_importance_scale


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
            enter several times: [bayes, "bayes:policy=pretrained_refitted"].
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


@dataclass(frozen=True)
class EpisodeOptions:
    """Which budgets tasks have, and how their plans are drawn and scored.

    Attributes:
        params: Fractions of the parameters to keep, a task each.
        macs: Fractions of the multiply-accumulates to keep, a task each.
        plans: Plans around greedy's that every task scores.
        noises: Standard deviations of the plans' actions, in turn.
        batches: Batches of held-out images that each plan is scored on, in turn; greedy's is on all of them.
        metric: What plans gain over greedy's: accuracy, agreement or soft_agreement.
        importance_scale: Log-importance of action 1.
    """

    # Plans near greedy's and far from it, scored by what moves with every change of the weights; more plans
    # teach more than the same ones scored on more images.
    PYTHON_ONLY: ClassVar[tuple[str, ...]] = ("noises", "batches", "metric", "importance_scale")

    params: tuple[float, ...] = (0.35, 0.25, 0.167, 0.11)
    macs: tuple[float, ...] = (0.4,)
    plans: int = 64
    noises: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    batches: int = 2
    metric: ScoreMetric = "soft_agreement"
    importance_scale: float = IMPORTANCE_SCALE

    def __post_init__(self) -> None:
        for name, fraction in self.budgets:
            check_fractions({name: fraction})
        if not self.budgets:
            raise ConfigError("pretrain.params and pretrain.macs are both empty; set a budget, such as 0.25")
        for name in ("plans", "batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"pretrain.{name} must be at least 1, got {getattr(self, name)}")
        if not self.noises or not all(noise > 0 for noise in self.noises):
            raise ConfigError(f"noises must hold positive numbers, got {list(self.noises)}")
        check_choice("metric", self.metric, ScoreMetric)
        check_importance_scale(self.importance_scale)

    @property
    def budgets(self) -> list[tuple[str, float]]:
        """Measure and fraction of every task."""
        return [("params", each) for each in self.params] + [("macs", each) for each in self.macs]


@dataclass(frozen=True)
class PretrainingOptions:
    """How a policy is trained on what tasks teach.

    Attributes:
        hidden: Units of the policy's hidden layers.
        steps: Gradient steps (AdamW), each on all tasks.
        learning_rate: Their learning rate; it falls to 0 along a cosine.
        weight_decay: Decay of the weights.
        jitter: Standard deviation of the noise on descriptors, which lie in [0, 1].
        restraint: What the square of an action costs: the policy leaves greedy's plan where it knows nothing.
    """

    # Fewer units, fewer steps or more restraint are worth what more jitter is (docs/benchmarks.md).
    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (
        *("hidden", "steps", "learning_rate", "weight_decay", "restraint"),
    )

    hidden: tuple[int, ...] = (32, 32)
    steps: int = 400
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    jitter: float = 0.15
    restraint: float = 0.05

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.learning_rate > 0:
            raise ConfigError(
                "steps must be at least 1 and learning_rate positive, got "
                f"{self.steps} and {self.learning_rate}"
            )
        for name in ("weight_decay", "jitter", "restraint"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"pretrain.{name} must not be negative, got {getattr(self, name)}")
        if not self.hidden or any(units < 1 for units in self.hidden):
            raise ConfigError(
                "hidden must hold numbers of units >= 1, one or more, as in [32, 32], got "
                f"{list(self.hidden)}"
            )


@dataclass(frozen=True)
class PretrainOptions(PretrainingOptions, EpisodeOptions):
    """Networks, formats and budgets that task=pretrain trains a policy on, and settings of the training.

    Every network is a checkpoint; decomposition, calibration and search.images say how its layers are fitted
    and its plans scored.

    Attributes:
        networks: The networks, each with the options of `model`, for example
            [{architecture: resnet20, checkpoint: a.th}]; empty for `model` itself.
        formats: The formats, tasks each; None for decomposition.
        add: Folders of earlier runs of task=pretrain, perhaps on other datasets, whose tasks count too.
    """

    PYTHON_ONLY = (*EpisodeOptions.PYTHON_ONLY, *PretrainingOptions.PYTHON_ONLY)

    networks: tuple[Mapping[str, Any], ...] = ()
    formats: tuple[str, ...] | None = None
    add: tuple[str | Path, ...] = ()

    def __post_init__(self) -> None:
        EpisodeOptions.__post_init__(self)
        PretrainingOptions.__post_init__(self)
        if self.formats is not None and not self.formats:
            raise ConfigError(
                "pretrain.formats is empty; name formats, as in [tucker], or null for decomposition's"
            )
