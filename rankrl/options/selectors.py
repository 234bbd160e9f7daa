"""Options of the selectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankrl.errors import ConfigError
from rankrl.options.agents import ActionKind, AgentOptions
from rankrl.options.decomposition import AUTO


@dataclass(frozen=True)
class NoOptions:
    """Options of what has none."""


@dataclass(frozen=True)
class StepOptions:
    """Options of `random` and `tpe`.

    Attributes:
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    plans_per_step: int = 1

    def __post_init__(self) -> None:
        _check_least(self, plans_per_step=1)


@dataclass(frozen=True)
class LEMSOptions(StepOptions):
    """Options of `lems`.

    Attributes:
        plans_per_step: Plans proposed at once, for parallel scoring.
        trials: Plans to try, each with a weight of depth of its own.
    """

    trials: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least(self, trials=1)


@dataclass(frozen=True)
class LocalOptions:
    """Options of `local`.

    Attributes:
        step: Standard deviation of a change, in units of the action.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    step: float = 0.3
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_least(self, plans_per_step=1)


@dataclass(frozen=True)
class CMAESOptions:
    """Options of `cmaes`.

    Attributes:
        step: Standard deviation of the first generation, in units of the action.
        population: Plans in a generation; None for 4 + 3 log(layers).
    """

    step: float = 0.3
    population: int | None = None

    def __post_init__(self) -> None:
        _check_step(self.step)
        if self.population is not None and self.population < 3:
            raise ConfigError(f"selector.population must be at least 3 or null, got {self.population}")


@dataclass(frozen=True)
class BayesOptions:
    """Options of `bayes`.

    Attributes:
        policy: A policy to start from, which `task=pretrain` made: its file, or `pretrained_refitted`, which
            comes with rankrl and learnt from refitted plans; `action` is the file's.
            `auto` is `pretrained_refitted` where plans are ranks and roundings within a budget, else None,
            which knows nothing beforehand.
        action: What an action stands for: `importance` or `rank`; None takes importance with a budget, rank
            without.
        warmup_episodes: Plans around greedy's before the process chooses.
        step: Standard deviation of a change after the warm-up, in units of the action; it decays.
        candidates: Plans imagined for each one that is scored.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    policy: str | Path | None = AUTO
    action: ActionKind | None = None
    warmup_episodes: int = 15
    step: float = 0.3
    candidates: int = 128
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_least(self, warmup_episodes=0, candidates=1, plans_per_step=1)


SELECTORS = {
    "bayes": BayesOptions,
    "cmaes": CMAESOptions,
    "ddpg": AgentOptions,
    "divergence": NoOptions,
    "energy": NoOptions,
    "greedy": NoOptions,
    "lems": LEMSOptions,
    "local": LocalOptions,
    "random": StepOptions,
    "sac": AgentOptions,
    "td3": AgentOptions,
    "tpe": StepOptions,
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


def _check_step(step: float) -> None:
    if not step > 0:
        raise ConfigError(f"selector.step must be positive, got {step}")
