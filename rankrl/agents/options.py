"""The agent's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from rankrl.envs.actions import IMPORTANCE_SCALE, ActionKind, check_importance_scale
from rankrl.envs.features import Feature
from rankrl.errors import ConfigError


@dataclass(frozen=True)
class AgentOptions:
    """Hyper-parameters of DDPG, TD3 and SAC on rank selection.

    Returns are not discounted (gamma 1) and not bootstrapped (`EpisodeBuffer`).

    Attributes:
        action: What an action stands for: `importance` (None with a budget) or `rank` (None without).
        per_bond: One action component a bond of the format, with `rank`.
        features: Features beyond the layer's own and the previous action (`ObservationEncoder`). `identity`
            lets the networks tell equal layers apart; with `plan` the critic of the last layer sees the whole
            plan, without which screening candidates means nothing.
        importance_scale: Log-importance of action 1, with `importance`.
        hidden: Units of the hidden layers of actor and critics.
        actor_rate: Learning rate of the actor (Adam).
        critic_rate: Learning rate of the critics (Adam).
        batch_size: Transitions in an update.
        buffer_episodes: Episodes in the replay buffer; None keeps all.
        critics: Q-networks in the ensemble.
        warmup_episodes: Episodes that explore around the preset before the policy acts.
        warmup_noise: Standard deviation of the noise around the preset; the networks learn from them already.
        noise: Standard deviation of the noise on the policy's actions after the warm-up.
        final_noise: The same at the last episode; it decays geometrically between.
        updates_per_episode: Gradient steps after every episode.
        whole_share: Share of the transitions in an update that are taken from the last layer alone, where the
            critics see whole plans.
        output_penalty: Weight of the mean square of the actor's output before tanh in its loss; without it
            tanh saturates and learning stops.
        candidates: Episodes imagined for each one that is scored; the critics choose among them.
        elite_share: Share of the candidates that change the best episode so far instead of the policy's.
        plan_critic: Let a Gaussian process over what the layers lose (`PlanCritic`) choose among candidates,
            not the ensemble of critics; needs plans made of candidates, not `per_bond`.
        refinements: With `plan_critic`: how often the most promising candidates are changed again.
        optimism: Standard deviations of the ensemble that are added to its mean value in that choice.
        plans_per_step: Plans proposed at once, for parallel scoring; the agent learns after all of them.
    """

    action: ActionKind | None = None
    per_bond: bool = False
    features: tuple[Feature, ...] = ("identity", "plan")
    importance_scale: float = IMPORTANCE_SCALE
    hidden: tuple[int, ...] = (64, 64)
    actor_rate: float = 1e-4
    critic_rate: float = 3e-3
    batch_size: int = 128
    buffer_episodes: int | None = None
    critics: int = 5
    warmup_episodes: int = 15
    warmup_noise: float = 0.15
    noise: float = 0.3
    final_noise: float = 0.05
    updates_per_episode: int = 6
    whole_share: float = 0.5
    output_penalty: float = 1e-2
    candidates: int = 128
    elite_share: float = 0.5
    plan_critic: bool = True
    refinements: int = 2
    optimism: float = 0.5
    plans_per_step: int = 1

    def __post_init__(self) -> None:
        least = {
            "actor_rate": 0.0,
            "critic_rate": 0.0,
            "batch_size": 1,
            "critics": 1,
            "warmup_episodes": 0,
            "warmup_noise": 0.0,
            "noise": 0.0,
            "final_noise": 0.0,
            "updates_per_episode": 0,
            "whole_share": 0.0,
            "output_penalty": 0.0,
            "candidates": 1,
            "elite_share": 0.0,
            "refinements": 0,
            "optimism": 0.0,
            "plans_per_step": 1,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"selector.{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("elite_share", "whole_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"selector.{name} must be at most 1, got {getattr(self, name)}")
        if (self.noise > 0) != (self.final_noise > 0) or self.final_noise > self.noise:
            raise ConfigError(
                "selector.noise decays to selector.final_noise: both positive and not growing, or both 0; "
                f"got {self.noise} and {self.final_noise}"
            )
        if any(units < 1 for units in self.hidden):
            raise ConfigError(f"selector.hidden must hold numbers of units >= 1, got {list(self.hidden)}")
        check_importance_scale(self.importance_scale)
        if self.buffer_episodes is not None and self.buffer_episodes < 1:
            raise ConfigError(f"selector.buffer_episodes must be at least 1, got {self.buffer_episodes}")
