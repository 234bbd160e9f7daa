"""Select plans by reinforcement learning: DDPG, TD3 and SAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankrl.plan_search.agents import AgentOptions
from rankrl.plan_search.envs.actions import ActionKind, check_action
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting


class ReinforcementSelector(Selector):
    """Plays the policy of a `PolicyAgent` with noise; its options are those of `AgentOptions`.

    The first plan is greedy's; a warm-up around it follows, then the policy acts. With a pretrained policy
    the first plan is the policy's, without noise, the second is greedy's, and the warm-up, in which only the
    critics learn, is around the first.
    """

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self.agent_options = agent_options(options)
        from rankrl.plan_search.agents import PolicyAgent  # imports stable-baselines3

        self.agent = PolicyAgent(problem, self.name, self.agent_options, seed=seed, episodes=episodes)
        self._pretrained = self.agent_options.policy is not None
        self._centre = np.zeros(self.agent.env.layers, dtype=np.float32)
        if self._pretrained:
            self._centre = self.agent.act(np.zeros((1, self.agent.env.layers)), deterministic=True)[0]

    @classmethod
    def option_owner(cls) -> type[AgentOptions]:
        """Return the dataclass of the agent's hyper-parameters."""
        return AgentOptions

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters out of their ranges, and a policy that cannot be read or does not fit."""
        own = agent_options(options)
        if own.policy is not None:
            from rankrl.plan_search.agents.policy_file import options_with_policy, read_policy

            options_with_policy(own, read_policy(own.policy))

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a kind of action that does not suit the search."""
        action: ActionKind | None = options["action"] if options["policy"] is None else "importance"
        check_action(action, setting=setting)

    def propose(self) -> list[Proposal]:
        """Play episodes."""
        generator = self.generator()
        alone = self.observed == 0 or (self._pretrained and self.observed == 1)
        count = 1 if alone else self.agent_options.plans_per_step
        shape, phase = (count, self.agent.env.layers), "policy"
        if self._pretrained and self.observed == 0:
            actions, phase = self._centre[None], "pretrained"
        elif alone:
            actions, phase = np.zeros(shape, dtype=np.float32), "preset"
        elif self._warming_up:
            noise = self.agent_options.warmup_noise * generator.standard_normal(shape)
            actions, phase = (self._centre + noise).clip(-1, 1).astype(np.float32), "warm-up"
        else:
            scale = self.agent_options.noise_at(self.observed, self.episodes)
            actions = self.agent.act(scale * generator.standard_normal(shape))
        choices_of = self.agent.env.map.choices_of
        return [Proposal(choices_of(each), phase, tuple(each.tolist())) for each in actions]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Train the agent on the episodes."""
        super().observe(proposals, rewards)
        keep_actor = self._pretrained and self._warming_up
        for proposal, reward in zip(proposals, rewards, strict=True):
            actions = np.array(proposal.actions, dtype=np.float32)
            self.agent.learn(actions, reward, keep_actor=keep_actor)

    @property
    def _warming_up(self) -> bool:
        return self.observed < self.agent_options.warmup_episodes


def agent_options(options: Mapping[str, Any]) -> AgentOptions:
    """Build hyper-parameters from plain values, turning lists into tuples."""
    lists = {name: tuple(options[name]) for name in ("features", "hidden") if name in options}
    return AgentOptions(**{**options, **lists})


@register_selector
class DDPGSelector(ReinforcementSelector):
    """Deep deterministic policy gradient (Lillicrap et al., ICLR 2016), by stable-baselines3."""

    name = "ddpg"
    description = "deep deterministic policy gradient, from greedy's plan"


@register_selector
class TD3Selector(ReinforcementSelector):
    """Twin delayed DDPG (Fujimoto et al., ICML 2018), by stable-baselines3.

    It has two critics, and an actor that learns at every other step.
    """

    name = "td3"
    description = "twin delayed DDPG: two critics, an actor that learns at every other step"


@register_selector
class SACSelector(ReinforcementSelector):
    """Soft actor-critic (Haarnoja et al., ICML 2018), by stable-baselines3: a stochastic policy."""

    name = "sac"
    description = "soft actor-critic: a stochastic policy that is paid for entropy"
