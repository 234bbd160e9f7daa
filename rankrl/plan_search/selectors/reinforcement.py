"""The agents as selectors: ddpg, td3 and sac, as their papers have them."""

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

    The first plan is greedy's. A warm-up around it follows, then the policy acts. With a pretrained policy
    the first plan is the policy's, without noise, the second is greedy's, and the warm-up, in which the
    critics learn alone, is around the first.
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
        """Return the hyper-parameters of the agent."""
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
        """Refuse an action that the search has no use for."""
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
        """Learn from the episodes played last."""
        keep_actor = self._pretrained and self._warming_up
        for actions, reward in zip(self._actions, rewards, strict=False):
            self.agent.learn(actions, reward, keep_actor=keep_actor)

    def state(self) -> SelectorState:
        """Return the agent's state and the noise's."""
        tensors, values = self.agent.state()
        noise = {"played": self._played, "generator": generator_state(self._generator)}
        if self._pretrained:
            tensors["centre"] = torch.from_numpy(self._centre.copy())
        return SelectorState(tensors, {**values, **noise})

    def restore(self, state: SelectorState) -> None:
        """Take over the agent's state and the noise's."""
        self.agent.restore(state.tensors, state.values)
        self._played = int(state.values["played"])
        if self._pretrained:
            self._centre = state.tensors["centre"].numpy().copy()
        restore_generator(self._generator, state.values["generator"])

    @property
    def _warming_up(self) -> bool:
        return self._played < self.agent_options.warmup_episodes


def agent_options(options: Mapping[str, Any]) -> AgentOptions:
    """Return hyper-parameters from plain values, whose lists are tuples there."""
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
