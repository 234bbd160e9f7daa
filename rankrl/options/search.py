"""Options of budgets, scores, rewards and searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_fields, check_least
from rankrl.options.selectors import NoOptions

ScoreMetric = Literal["accuracy", "agreement", "soft_agreement"]
Statistics = Literal["corrected", "refitted"]


@dataclass(frozen=True)
class ScoringOptions:
    """How plans are scored.

    Attributes:
        augmented: Score one fixed augmented copy of the held-out images: a network that has seen them in its
            training has not seen them like this.
        refit_images: Training images that `statistics` of `refitted` solve every layer on.
        batch_size: Images in a batch; None for what suits the device.
    """

    # Each device has a size of batches that suits it, and scores do not depend on it.
    PYTHON_ONLY = ("batch_size",)

    augmented: bool = True
    refit_images: int = 512
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_least("search", self, refit_images=1, batch_size=1)


def check_choice(option: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of a Literal's."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ConfigError(
            f"{option} must be one of {', '.join(allowed)}, got {value!r}.{did_you_mean(value, allowed)}"
        )


CountedCost = Literal["params", "macs"]


@dataclass(frozen=True)
class AMCOptions:
    """Options of `amc`."""

    measure: CountedCost = "params"


@dataclass(frozen=True)
class WeightedOptions:
    """Options of `weighted`."""

    compression: float = 0.3
    measure: CountedCost = "params"


REWARDS: dict[str, type] = {"accuracy": NoOptions, "amc": AMCOptions, "weighted": WeightedOptions}
"""Options by the reward's name."""


MEASURES = ("params", "macs", "bytes", "latency")
"""Measures of cost that budgets count, time last."""


@dataclass(frozen=True)
class BudgetOptions:
    """Limits that plans keep to: a fraction of the dense network's cost, or two at once; or a bounded loss.

    With none, rewards that ignore size keep 0.4 of the parameters, the others have no limit.

    Attributes:
        drop: How much of the original's score may be lost, in [0, 1): of the accuracy where there are labels,
            of the agreement with the original where there are none, or of your own score. The result is then
            the fastest or smallest network found within it, and no fraction is given.
        minimise: What to minimise within `drop`: latency, bytes, macs or params.
        params: Fraction of the parameters to keep at most, or None.
        macs: Fraction of the multiply-accumulates to keep at most, or None.
        bytes: Fraction of the bytes of the parameters in a file to keep at most, or None.
        latency: Fraction of the dense network's time in onnxruntime on this machine to keep at most, or None.
        memory: Fraction of the bytes of activations that the dense network holds at once, for one input, to
            keep at most, alone or besides any of the others; None for no limit.
    """

    drop: float | None = None
    minimise: str = "latency"
    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    latency: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_fractions({**self._all, "memory": self.memory})
        check_number_of_budgets(self._all)
        if self.minimise not in MEASURES:
            raise ConfigError(f"budget.minimise={self.minimise!r} is none of {', '.join(MEASURES)}")
        if self.drop is None:
            if self.memory is not None and not self.fractions:
                object.__setattr__(self, "params", 1.0)  # memory alone limits no layer's parameters
            return
        if not 0 <= self.drop < 1:
            raise ConfigError(
                f"budget.drop={self.drop} is outside [0, 1); it is the loss of score that you accept, for "
                "example 0.005 for half a point of accuracy"
            )
        fixed = [name for name, value in self._all.items() if value not in (None, 1.0)]
        if fixed:
            raise ConfigError(
                f"budget.drop={self.drop} looks for the best fraction itself; leave budget.{fixed[0]} or "
                "budget.drop out"
            )
        object.__setattr__(self, self.minimise, 1.0)  # any fraction may be kept to begin with

    @property
    def _all(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in MEASURES}

    @property
    def fractions(self) -> dict[str, float]:
        """The fractions that are set, by measure."""
        return {name: value for name, value in self._all.items() if value is not None}

    @property
    def numbers(self) -> dict[str, float | str]:
        """The budget that was asked for, as metrics.json has it: `{"params": 0.5}`."""
        memory = {} if self.memory is None else {"memory": self.memory}
        if self.drop is not None:
            return {"drop": self.drop, "minimise": self.minimise, **memory}
        return {**self.fractions, **memory}

    @property
    def counted(self) -> dict[str, float | None]:
        """The fractions of what is counted, not timed, by measure."""
        return {"params": self.params, "macs": self.macs, "bytes": self.bytes}


def objective_line(known: Mapping[str, Any], budget: Mapping[str, Any]) -> str:
    """Name action, reward, metric and budget of a search, as far as it has them."""
    named = [f"{key} {known[key]}" for key in ("action", "reward", "metric") if known.get(key)]
    return ", ".join([*named, budget_line(budget)])


def budget_line(budget: Mapping[str, Any]) -> str:
    """Write a budget of metrics.json: `budget params 0.4`."""
    limits = [f"{key} {value}" for key, value in budget.items()]
    return " ".join(["budget", *limits]) if limits else "no budget"


def check_fractions(fractions: Mapping[str, float | None]) -> None:
    """Refuse budgets that are no fractions."""
    for name, value in fractions.items():
        if value is not None and not 0 < value <= 1:
            raise ConfigError(
                f"budget.{name}={value} is outside (0, 1]; it is the fraction to keep, for example 0.4"
            )


def check_number_of_budgets(fractions: Mapping[str, float | None]) -> None:
    """Refuse more than two budgets."""
    asked = [f"budget.{name}={value}" for name, value in fractions.items() if value is not None]
    if len(asked) > 2:
        raise ConfigError(
            f"{', '.join(asked[:-1])} and {asked[-1]} are all set; a search keeps at most two budgets: set "
            "the others to null"
        )


Cluster = Literal["local", "ray"]
REFITTED_FINALISTS = 5
"""Plans that are applied and scored again where a search's scores do not see the refit."""


@dataclass(frozen=True)
class ChosenScores:
    """The metric that scores plans, and how many are scored again when they are applied.

    Attributes:
        metric: As `SearchOptions.metric`.
        statistics: As `SearchOptions.statistics`.
        finalists: As `SearchOptions.finalists`.
    """

    metric: ScoreMetric
    statistics: Statistics
    finalists: int


@dataclass(frozen=True)
class SearchOptions(ScoringOptions):
    """How long plans are searched and how they are scored.

    Attributes:
        episodes: Episodes at most: plans that are proposed, also again.
        plans: Different plans to score, or None for as many as there are episodes. An episode that repeats
            a plan costs nothing, so selectors are compared at equal `plans`, with more `episodes`.
        seconds: Take the best plan measured so far after so many seconds of the whole call, reading, timing
            and fitting included; None for no limit. At least one step of plans is scored, and the chosen plan
            is applied, exported, checked and fine-tuned after them. task=compare gives each search so many.
        patience: Stop after so many episodes without a better plan, or None.
        images: Images held out of the training set that each plan is scored on.
        metric: `accuracy` on the labels; `agreement`, the share of images on which the plan and the dense
            network choose the same class; `soft_agreement`, the mean overlap sum_k min(p_k, q_k) of their
            class probabilities, which moves with every change of the weights. None for `soft_agreement` with
            statistics of `refitted` and for a network in a file, else `accuracy`.
        statistics: `corrected` moves biases and batch-norm means analytically; `refitted` solves every layer
            for what reaches it, as applying the plan does, and takes several times as long
            (`decomposition.choose.quick_refit`). None for `refitted` where plans are ranks
            and roundings of a data set's network, else `corrected`.
        finalists: How many of the best plans are applied, refit and all, and scored again, with greedy's
            plan; the best of them is returned. 1 takes the plan with the best reward. With budget.latency
            they are the best plans that keep the time when they are exported and timed. None for 1 with
            statistics of `refitted`, else 5.
        workers: Processes that fit layers and score plans; None works in this one. They share out the layers,
            then the plans of a step (selector.plans_per_step) or the images of a plan.
        cluster: Where they are: `local`, or `ray` (extra `ray`) for a Ray cluster.
        worker_cpus: Processor cores of each worker: the threads that it computes with.
        worker_gpus: GPUs of each worker on a Ray cluster, on which it scores plans; 0.5 lets two share one.
    """

    episodes: int = 50
    plans: int | None = None
    seconds: float | None = None
    patience: int | None = None
    images: int = 2000
    metric: ScoreMetric | None = None
    statistics: Statistics | None = None
    finalists: int | None = None
    workers: int | None = None
    cluster: Cluster = "local"
    worker_cpus: int = 1
    worker_gpus: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()
        check_workers(self.workers, self.cluster, self.worker_cpus, self.worker_gpus)
        check_limits(self.episodes, self.seconds, self.patience, self.plans)
        for name, choices in (("metric", ScoreMetric), ("statistics", Statistics)):
            if getattr(self, name) is not None:
                check_choice(f"search.{name}", getattr(self, name), choices)
        check_least("search", self, images=1, finalists=1)

    def scores(self, *, refits: bool = False) -> ChosenScores:
        """Return how plans are scored; None is replaced by what the tables recommend.

        Args:
            refits: Whether plans can be scored as they are refitted: they are ranks and roundings of a data
                set's network.
        """
        statistics: Statistics = self.statistics or ("refitted" if refits else "corrected")
        seen = statistics == "refitted"
        metric: ScoreMetric = self.metric or ("soft_agreement" if seen else "accuracy")
        return ChosenScores(metric, statistics, self.finalists or (1 if seen else REFITTED_FINALISTS))

    def resolved(self, *, refits: bool) -> SearchOptions:
        """Return the options with `scores` in place of None."""
        return replace(self, **asdict(self.scores(refits=refits)))


def check_limits(
    episodes: int, seconds: float | None, patience: int | None, plans: int | None = None
) -> None:
    """Refuse limits of a search that leave no plan to score."""
    limits = {"episodes": episodes, "seconds": seconds, "patience": patience, "plans": plans}
    for name, value in limits.items():
        if value is not None and not value > 0:
            advice = "" if name == "episodes" else "; null means no limit"
            raise ConfigError(f"search.{name} must be positive, got {value}{advice}")


def check_workers(size: int | None, cluster: str, cpus: int = 1, gpus: float = 0.0) -> None:
    """Refuse options of workers that cannot be right."""
    check_choice("search.cluster", cluster, Cluster)
    if size is None and cluster != "local":
        raise ConfigError(f"search.cluster={cluster} needs search.workers=N, the number of workers")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(
            f"search.workers must be a whole number >= 1, or null to score in this process; got {size!r}"
        )
    if isinstance(cpus, bool) or not isinstance(cpus, int) or cpus < 1:
        raise ConfigError(
            f"search.worker_cpus must be a whole number >= 1, the cores of each worker; got {cpus!r}"
        )
    if not 0 <= gpus < math.inf or (gpus > 1 and gpus != int(gpus)):
        raise ConfigError(
            "search.worker_gpus must be a whole number of GPUs for each worker, or a share of one such as "
            f"0.5; got {gpus!r}"
        )
    if gpus > 0 and cluster == "local":
        raise ConfigError(
            f"search.worker_gpus={gpus:g} asks a cluster for GPUs; local workers use the one that this "
            "process uses. Leave it out, or set search.cluster=ray"
        )


@dataclass(frozen=True)
class CalibrationOptions:
    """The training images that layers are fitted on.

    Attributes:
        images: How many. More than 1,000 rarely help.
    """

    images: int = 768

    def __post_init__(self) -> None:
        check_calibration(self.images)


def check_calibration(count: int) -> None:
    """Refuse a number of calibration images."""
    if count < 1:
        raise ConfigError(f"calibration.images must be at least 1, got {count}")


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
