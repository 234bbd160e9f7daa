"""Options of selectors and agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankrl.errors import ConfigError
from rankrl.option_types import check_least, check_positive

ActionKind = Literal["importance", "rank", "ratio"]
Feature = Literal["macs", "curve", "descriptors", "identity", "budget", "budget_left", "last_reward", "plan"]

IMPORTANCE_SCALE = 2.0
"""Log-importance of action 1: a layer then counts e^2 = 7.4 times what it does at action 0."""
FINAL_SCALE = 0.05
"""Final value of noise on actions and of changes of them, in units of the action; the decay is geometric."""


@dataclass(frozen=True)
class AgentOptions:
    """Hyper-parameters of DDPG, TD3 and SAC on rank selection.

    Returns are not discounted (gamma 1): a plan is good or bad as a whole.

    Attributes:
        action: What an action stands for: `importance`, `rank` or `ratio`; None takes importance with a
            budget, rank without.
        features: What the policy sees beyond the layer's own descriptors and the previous action
            (`ObservationEncoder`).
        hidden: Units of the hidden layers of actor and critics.
        learning_rate: Learning rate of actor and critics (Adam).
        batch_size: Transitions in an update.
        warmup_episodes: Episodes that explore around the preset before the policy acts.
        warmup_noise: Standard deviation of the noise around the preset.
        noise: Standard deviation of the noise on the policy's actions after the warm-up; it decays.
        noise_decay: Factor of the noise from one episode to the next; None for the one that ends at 0.05.
        updates_per_episode: Gradient steps after every episode; None for as many as it has layers.
        plans_per_step: Plans proposed at once, for parallel scoring; the agent learns after all of them.
    """

    action: ActionKind | None = None
    features: tuple[Feature, ...] = ("macs", "curve")
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 1e-3
    batch_size: int = 64
    warmup_episodes: int = 15
    warmup_noise: float = 0.15
    noise: float = 0.3
    noise_decay: float | None = None
    updates_per_episode: int | None = None
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        for name in ("features", "hidden"):  # lists, where they come from a file
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = {"batch_size": 1, "warmup_episodes": 0, "updates_per_episode": 1, "plans_per_step": 1}
        check_least("selector", self, **whole, warmup_noise=0.0, noise=0.0)
        check_positive("selector", self, "learning_rate")
        if any(units < 1 for units in self.hidden):
            raise ConfigError(f"selector.hidden must hold numbers of units >= 1, got {list(self.hidden)}")
        if self.noise_decay is not None and not 0 < self.noise_decay <= 1:
            raise ConfigError(f"selector.noise_decay must lie in (0, 1] or be null, got {self.noise_decay}")


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
        check_least("selector", self, plans_per_step=1)


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
        check_positive("selector", self, "step")
        check_least("selector", self, plans_per_step=1)


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
        check_positive("selector", self, "step")
        check_least("selector", self, population=3)


@dataclass(frozen=True)
class BayesOptions:
    """Options of `bayes`.

    Attributes:
        action: What an action stands for: `importance` or `rank`; None takes importance with a budget, rank
            without.
        warmup_episodes: Plans around greedy's before the process chooses.
        step: Standard deviation of a change after the warm-up, in units of the action; it decays.
        candidates: Plans imagined for each one that is scored.
        plans_per_step: Plans proposed at once, for parallel scoring.
    """

    action: Literal["importance", "rank"] | None = None
    warmup_episodes: int = 15
    step: float = 0.3
    candidates: int = 128
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        check_positive("selector", self, "step")
        check_least("selector", self, warmup_episodes=0, candidates=1, plans_per_step=1)


SELECTORS = {
    "bayes": BayesOptions,
    "cmaes": CMAESOptions,
    "ddpg": AgentOptions,
    "divergence": NoOptions,
    "local": LocalOptions,
    "random": StepOptions,
    "sac": AgentOptions,
    "td3": AgentOptions,
    "tpe": StepOptions,
}
"""Options by the selector's name; the heuristics of `decomposition`, which are selectors too, have none."""
DEFAULT_SELECTOR = "greedy"
"""The default selector: a rule, which takes seconds and scores no plans."""
