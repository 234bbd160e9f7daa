"""Select plans by reinforcement learning: DDPG, TD3 and SAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rankrl.plan_search.agents import AgentOptions
from rankrl.plan_search.envs.actions import ActionKind, check_action
from rankrl.plan_search.selectors.selector import (
    Proposal,
    Selector,
    SelectorState,
    generator_state,
    register_selector,
    restore_generator,
)
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
        self._generator = np.random.default_rng(seed)
        self._played = 0
        self._actions: list[np.ndarray] = []
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
        alone = self._played == 0 or (self._pretrained and self._played == 1)
        count = 1 if alone else self.agent_options.plans_per_step
        shape, phase = (count, self.agent.env.layers), "policy"
        if self._pretrained and self._played == 0:
            actions, phase = self._centre[None], "pretrained"
        elif alone:
            actions, phase = np.zeros(shape, dtype=np.float32), "preset"
        elif self._warming_up:
            noise = self.agent_options.warmup_noise * self._generator.standard_normal(shape)
            actions, phase = (self._centre + noise).clip(-1, 1).astype(np.float32), "warm-up"
        else:
            scale = self.agent_options.noise_at(self._played, self.episodes)
            actions = self.agent.act(scale * self._generator.standard_normal(shape))
        self._actions = list(actions)
        self._played += count
        return [Proposal(self.agent.env.map.choices_of(each), phase) for each in self._actions]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Train the agent on the last episodes."""
        keep_actor = self._pretrained and self._warming_up
        for actions, reward in zip(self._actions, rewards, strict=False):
            self.agent.learn(actions, reward, keep_actor=keep_actor)

    def state(self) -> SelectorState:
        """Return the states of the agent and of the noise."""
        tensors, values = self.agent.state()
        noise = {"played": self._played, "generator": generator_state(self._generator)}
        if self._pretrained:
            tensors["centre"] = torch.from_numpy(self._centre.copy())
        return SelectorState(tensors, {**values, **noise})

    def restore(self, state: SelectorState) -> None:
        """Restore the states of the agent and of the noise."""
        self.agent.restore(state.tensors, state.values)
        self._played = int(state.values["played"])
        if self._pretrained:
            self._centre = state.tensors["centre"].numpy().copy()
        restore_generator(self._generator, state.values["generator"])

    @property
    def _warming_up(self) -> bool:
        return self._played < self.agent_options.warmup_episodes


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
