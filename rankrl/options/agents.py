"""The agent's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rankrl.errors import ConfigError

ActionKind = Literal["importance", "rank"]
Feature = Literal["macs", "curve", "descriptors", "identity", "budget_left", "last_reward", "plan"]

IMPORTANCE_SCALE = 2.0
"""Log-importance of action 1: a layer then counts e^2 = 7.4 times what it does at action 0."""
FINAL_SCALE = 0.05
"""What noise on actions, and changes of them, decay to geometrically, in units of the action."""


@dataclass(frozen=True)
class AgentOptions:
    """Hyper-parameters of DDPG, TD3 and SAC on rank selection.

    Returns are not discounted (gamma 1): a plan is good or bad as a whole.

    Attributes:
        policy: A policy to start from, which `task=pretrain` made: its file, or `pretrained_refitted`, which
            comes with rankrl and learnt from refitted plans. The first plan is then its own; `features`
            and `hidden` are the file's. None starts from greedy's plan.
        action: What an action stands for: `importance` or `rank`; None takes importance with a budget, rank
            without.
        features: What the policy sees beyond the layer's own descriptors and the previous action
            (`ObservationEncoder`).
        hidden: Units of the hidden layers of actor and critics.
        learning_rate: Learning rate of actor and critics (Adam).
        batch_size: Transitions in an update.
        warmup_episodes: Episodes that explore around the preset before the policy acts.
        warmup_noise: Standard deviation of the noise around the preset.
        noise: Standard deviation of the noise on the policy's actions after the warm-up; it decays.
        updates_per_episode: Gradient steps after every episode; None for as many as it has layers.
        plans_per_step: Plans proposed at once, for parallel scoring; the agent learns after all of them.
    """

    policy: str | Path | None = None
    action: ActionKind | None = None
    features: tuple[Feature, ...] = ("macs", "curve")
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 1e-3
    batch_size: int = 64
    warmup_episodes: int = 15
    warmup_noise: float = 0.15
    noise: float = 0.3
    updates_per_episode: int | None = None
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        least = {
            "batch_size": 1,
            "warmup_episodes": 0,
            "warmup_noise": 0.0,
            "noise": 0.0,
            "plans_per_step": 1,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"selector.{name} must be at least {bound}, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ConfigError(f"selector.learning_rate must be positive, got {self.learning_rate}")
        if any(units < 1 for units in self.hidden):
            raise ConfigError(f"selector.hidden must hold numbers of units >= 1, got {list(self.hidden)}")
        updates = self.updates_per_episode
        if updates is not None and updates < 1:
            raise ConfigError(f"selector.updates_per_episode must be at least 1 or null, got {updates}")

    def noise_at(self, episode: int, episodes: int) -> float:
        """Return the standard deviation of the policy's noise.

        Args:
            episode: Number of the episode, from 0 on.
            episodes: Episodes that the decay spans.
        """
        if self.noise == 0:
            return 0.0
        first, last = self.warmup_episodes, max(episodes - 1, self.warmup_episodes + 1)
        progress = min(1.0, max(0.0, (episode - first) / (last - first)))
        return self.noise * (min(FINAL_SCALE, self.noise) / self.noise) ** progress


def check_importance_scale(scale: float) -> None:
    """Refuse a log-importance of action 1 that is not positive.

    Raises:
        ConfigError: It is not.
    """
    if not scale > 0:
        raise ConfigError(f"importance_scale must be positive, got {scale}")
