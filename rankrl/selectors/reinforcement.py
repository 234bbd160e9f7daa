"""The agents as selectors: ddpg, td3 and sac, as their papers have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankrl.agents import AgentOptions
from rankrl.envs.actions import check_action
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.setting import SearchSetting
from rankrl.selectors.base import (
    Proposal,
    Selector,
    SelectorState,
    generator_state,
    restore_generator,
)
from rankrl.selectors.registry import register_selector


class ReinforcementSelector(Selector):
    """Plays the policy of a `PolicyAgent` with noise; its options are those of `AgentOptions`.

    The first plan is greedy's. A warm-up around it follows, then the policy acts.
    """

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self.agent_options = agent_options(options)
        from rankrl.agents import PolicyAgent  # imports stable-baselines3

        self.agent = PolicyAgent(problem, self.name, self.agent_options, seed=seed, episodes=episodes)
        self._generator = np.random.default_rng(seed)
        self._played = 0
        self._actions: list[np.ndarray] = []

    @classmethod
    def option_owner(cls) -> type[AgentOptions]:
        """Return the hyper-parameters of the agent."""
        return AgentOptions

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters out of their ranges."""
        agent_options(options)

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse an action that the search has no use for."""
        check_action(options["action"], per_bond=options["per_bond"], setting=setting)

    def propose(self) -> list[Proposal]:
        """Play episodes."""
        count = self.agent_options.plans_per_step if self._played else 1
        shape, phase = (count, *self.agent.shape), "policy"
        if self._played == 0:
            actions, phase = np.zeros(shape, dtype=np.float32), "preset"
        elif self._played < self.agent_options.warmup_episodes:
            noise = self.agent_options.warmup_noise * self._generator.standard_normal(shape)
            actions, phase = noise.clip(-1, 1).astype(np.float32), "warm-up"
        else:
            scale = self.agent_options.noise_at(self._played, self.episodes)
            actions = self.agent.act(scale * self._generator.standard_normal(shape))
        self._actions = list(actions)
        self._played += count
        return [Proposal(self.agent.env.map.choices_of(each), phase) for each in self._actions]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Learn from the episodes played last."""
        for actions, reward in zip(self._actions, rewards, strict=False):
            self.agent.learn(actions, reward)

    def state(self) -> SelectorState:
        """Return the agent's state and the noise's."""
        tensors, values = self.agent.state()
        noise = {"played": self._played, "generator": generator_state(self._generator)}
        return SelectorState(tensors, {**values, **noise})

    def restore(self, state: SelectorState) -> None:
        """Take over the agent's state and the noise's."""
        self.agent.restore(state.tensors, state.values)
        self._played = int(state.values["played"])
        restore_generator(self._generator, state.values["generator"])


def agent_options(options: Mapping[str, Any]) -> AgentOptions:
    """Return hyper-parameters from plain values, whose lists are tuples there.

    Raises:
        ConfigError: One is out of its range.
    """
    lists = {name: tuple(options[name]) for name in ("features", "hidden") if name in options}
    return AgentOptions(**{**options, **lists})


@register_selector
class DDPGSelector(ReinforcementSelector):
    """Deep deterministic policy gradient (Lillicrap et al., ICLR 2016), as stable-baselines3 has it."""

    name = "ddpg"
    description = "deep deterministic policy gradient, from greedy's plan"


@register_selector
class TD3Selector(ReinforcementSelector):
    """Twin delayed DDPG (Fujimoto et al., ICML 2018), as stable-baselines3 has it.

    It has two critics, and an actor that learns at every other step.
    """

    name = "td3"
    description = "twin delayed DDPG: two critics, an actor that learns at every other step"


@register_selector
class SACSelector(ReinforcementSelector):
    """Soft actor-critic (Haarnoja et al., ICML 2018), as stable-baselines3 has it: a stochastic policy."""

    name = "sac"
    description = "soft actor-critic: a stochastic policy that is paid for entropy"
