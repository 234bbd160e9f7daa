"""Define and register rewards: functions from the evaluation of a plan to one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decomposition.registry import Registry
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.option_types import check_options, parameter_types
from rankrl.options.search import CountedCost
from rankrl.plan_search.scores.evaluation import Evaluation

RewardFunction = Callable[[Evaluation], float]


@dataclass(frozen=True)
class Reward:
    name: str
    options: Mapping[str, Any]
    function: RewardFunction = field(repr=False, compare=False)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def __call__(self, evaluation: Evaluation) -> float:
        value = float(self.function(evaluation))
        if not math.isfinite(value):
            raise NonFiniteError(f"reward {self.name!r} is {value} for {evaluation}; check the reward")
        return value


@dataclass(frozen=True)
class RewardSource:
    name: str
    description: str
    needs_budget: bool
    make: Callable[..., RewardFunction]


_REWARDS: Registry[RewardSource] = Registry("reward", ConfigError)


def register_reward(
    name: str, description: str, *, needs_budget: bool = False
) -> Callable[[Callable[..., RewardFunction]], Callable[..., RewardFunction]]:
    """Register a function that makes a reward from keyword options.

    Raises:
        ConfigError: The name is taken.
    """

    def register(make: Callable[..., RewardFunction]) -> Callable[..., RewardFunction]:
        _REWARDS.add(name, RewardSource(name, description, needs_budget, make), description)
        return make

    return register


def list_rewards() -> list[str]:
    return _REWARDS.names()


def reward_source(name: str) -> RewardSource:
    return _REWARDS[name]


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Refuse unknown or invalid options of a reward before a search begins."""
    make = reward_source(name).make
    check_options(f"reward {name!r}", "reward", options, parameter_types(make))
    make(**options)


def create_reward(name: str, *, budgeted: bool, **options: Any) -> Reward:
    source = reward_source(name)
    if source.needs_budget and not budgeted:
        raise ConfigError(
            f"reward {name!r} ignores size and there is no budget: the dense network would win. Set "
            "budget.params or budget.macs, or use reward=weighted or reward=amc"
        )
    check_reward(name, options)
    return Reward(name, dict(options), source.make(**options))


@register_reward("accuracy", "the metric alone, under a hard budget", needs_budget=True)
def accuracy() -> RewardFunction:
    """R = score. Every plan keeps the budget, so nothing else needs weighing."""
    return lambda evaluation: evaluation.score


@register_reward("weighted", "weighted sum of the metric and the compression reached")
def weighted(*, compression: float = 0.3, measure: CountedCost = "params") -> RewardFunction:
    """R = (1 - c) score + c (1 - kept fraction).

    Args:
        compression: The weight c, 0 to 1.
        measure: Whether `params` or `macs` count as kept.
    """
    _check_measure(measure)
    if not 0 <= compression <= 1:
        raise ConfigError(f"reward.compression must lie in [0, 1], got {compression}")
    return lambda evaluation: (
        (1 - compression) * evaluation.score + compression * (1 - _kept(evaluation, measure))
    )


@register_reward("amc", "AMC's -(1 - accuracy) log(cost)")
def amc(*, measure: CountedCost = "params") -> RewardFunction:
    """R = -(1 - score) log(cost), cost the absolute count (He et al., ECCV 2018, equation 5).

    Args:
        measure: Whether parameters or multiply-accumulates are the cost.
    """
    _check_measure(measure)
    return lambda evaluation: -(1 - evaluation.score) * math.log(max(_count(evaluation, measure), 1))


def _check_measure(measure: str) -> None:
    if measure not in ("params", "macs"):
        raise ConfigError(f"reward.measure must be params or macs, got {measure!r}")


def _kept(evaluation: Evaluation, measure: CountedCost) -> float:
    return evaluation.params_kept if measure == "params" else evaluation.macs_kept


def _count(evaluation: Evaluation, measure: CountedCost) -> int:
    return evaluation.params if measure == "params" else evaluation.macs
