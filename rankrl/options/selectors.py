"""Options of the selectors."""

from __future__ import annotations

from dataclasses import dataclass

from rankrl.errors import ConfigError
from rankrl.options.agents import (
    IMPORTANCE_SCALE,
    ActionKind,
    AgentOptions,
    check_importance_scale,
)
from rankrl.options.decomposition import AUTO


@dataclass(frozen=True)
class NoOptions:
    """Options of what has none."""


@dataclass(frozen=True)
class RandomOptions:
    """Options of `random`.

    Attributes:
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    plans_per_step: int = 1

    def __post_init__(self) -> None:
        _check_least(self, plans_per_step=1)


@dataclass(frozen=True)
class LocalOptions:
    """Options of `local`.

    Attributes:
        step: Standard deviation of a change, in units of the action.
        share: Probability of each layer to be changed.
        importance_scale: Log-importance of action 1.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    step: float = 0.3
    share: float = 0.3
    importance_scale: float = IMPORTANCE_SCALE
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        if not self.step > 0 or not 0 < self.share <= 1:
            raise ConfigError(
                "selector.step must be positive and selector.share in (0, 1], got "
                f"{self.step} and {self.share}"
            )
        check_importance_scale(self.importance_scale)
        _check_least(self, plans_per_step=1)


@dataclass(frozen=True)
class TPEOptions:
    """Options of `tpe`.

    Attributes:
        importance_scale: Log-importance of action 1.
        startup_trials: Random trials before the estimators are used.
        multivariate: Model the layers jointly.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    importance_scale: float = IMPORTANCE_SCALE
    startup_trials: int = 10
    multivariate: bool = False
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        check_importance_scale(self.importance_scale)
        _check_least(self, plans_per_step=1)
        if self.startup_trials < 0:
            raise ConfigError(f"selector.startup_trials must not be negative, got {self.startup_trials}")


@dataclass(frozen=True)
class CMAESOptions:
    """Options of `cmaes`.

    Attributes:
        step: Standard deviation of the first generation, in units of the action.
        population: Plans in a generation; None for 4 + 3 log(layers).
        importance_scale: Log-importance of action 1.
    """

    step: float = 0.3
    population: int | None = None
    importance_scale: float = IMPORTANCE_SCALE

    def __post_init__(self) -> None:
        check_importance_scale(self.importance_scale)
        if not self.step > 0:
            raise ConfigError(f"selector.step must be positive, got {self.step}")
        if self.population is not None and self.population < 3:
            raise ConfigError(f"selector.population must be at least 3 or null, got {self.population}")


@dataclass(frozen=True)
class DivergenceOptions:
    """Options of `divergence`.

    Attributes:
        batches: Batches of held-out images that divergences are measured on.
    """

    batches: int = 2

    def __post_init__(self) -> None:
        _check_least(self, batches=1)


@dataclass(frozen=True)
class BayesOptions:
    """Options of `bayes`.

    Attributes:
        policy: A policy to start from, which `task=pretrain` made: its file, or `pretrained_refitted`, which
            comes with rankrl and learnt from refitted plans; `action` and `importance_scale` are the file's.
            `auto` is `pretrained_refitted` where plans are ranks and roundings within a budget, else None,
            which knows nothing beforehand.
        action: What an action stands for: `importance` or `rank`; None takes importance with a budget, rank
            without.
        importance_scale: Log-importance of action 1.
        warmup_episodes: Plans around greedy's before the process chooses.
        warmup_noise: Standard deviation of the noise around it.
        step: Standard deviation of a change after the warm-up, in units of the action.
        final_step: The same at the last plan; it decays geometrically between.
        candidates: Plans imagined for each one that is scored.
        refinements: How often the most promising ones are changed again.
        optimism: Standard deviations that are added to the expected reward.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    policy: str | None = AUTO
    action: ActionKind | None = None
    importance_scale: float = IMPORTANCE_SCALE
    warmup_episodes: int = 15
    warmup_noise: float = 0.15
    step: float = 0.3
    final_step: float = 0.05
    candidates: int = 128
    refinements: int = 2
    optimism: float = 0.5
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.final_step <= self.step:
            raise ConfigError(
                "selector.step decays to selector.final_step, both positive; got "
                f"{self.step} and {self.final_step}"
            )
        _check_least(self, warmup_episodes=0, warmup_noise=0, candidates=1, refinements=0, optimism=0)
        check_importance_scale(self.importance_scale)
        _check_least(self, plans_per_step=1)


SELECTORS = {
    "bayes": BayesOptions,
    "cmaes": CMAESOptions,
    "ddpg": AgentOptions,
    "divergence": DivergenceOptions,
    "energy": NoOptions,
    "greedy": NoOptions,
    "local": LocalOptions,
    "random": RandomOptions,
    "sac": AgentOptions,
    "td3": AgentOptions,
    "tpe": TPEOptions,
    "uniform": NoOptions,
    "vbmf": NoOptions,
}
"""Options by the selector's name."""
HEURISTICS = ("energy", "greedy", "uniform", "vbmf")
"""Selectors that are rules of `decomposition`: one plan, no search."""


def _check_least(options: object, **least: float) -> None:
    """Refuse options below their least values."""
    for name, bound in least.items():
        value = getattr(options, name)
        if not value >= bound:
            raise ConfigError(f"selector.{name} must be at least {bound}, got {value}")
