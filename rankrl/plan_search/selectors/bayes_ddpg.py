"""Bayesian optimisation to which a learning policy contributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rankrl.options.selectors import BayesDDPGOptions
from rankrl.plan_search.agents.options import AgentOptions, options_with_policy
from rankrl.plan_search.agents.policy_file import read_policy
from rankrl.plan_search.selectors.base import Proposal, SelectorState
from rankrl.plan_search.selectors.bayes import BayesSelector
from rankrl.plan_search.selectors.registry import register_selector
from rankrl.plan_search.selectors.reinforcement import agent_options
from rankrl.plan_search.space.problem import SearchProblem


@register_selector
class BayesDDPGSelector(BayesSelector):
    """`bayes`, some of whose imagined plans are noisy passes of a DDPG policy that learns from every plan.

    The Gaussian process still makes every choice. A pretrained policy (`policy`) is what the DDPG policy
    begins with; during the warm-up its critic learns alone.

    Args:
        problem: What to choose for.
        seed: Seed of the draws.
        episodes: Plans that the decay of the step spans.
        **options: Those of `BayesDDPGOptions`.
    """

    name = "bayes_ddpg"
    description = "bayes, with a DDPG policy that proposes some of the plans it chooses from"
    own_options = BayesDDPGOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes, **options)
        own = BayesDDPGOptions(**options)
        self.policy_share = own.policy_share
        chosen = self._agent_options(asdict(own))
        from rankrl.plan_search.agents import PolicyAgent  # imports stable-baselines3

        self.agent = PolicyAgent(problem, "ddpg", chosen, seed=seed, episodes=episodes)

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse options out of their ranges."""
        super().check_ranges(options)
        chosen = cls._agent_options(options)
        if chosen.policy is not None:
            options_with_policy(chosen, read_policy(chosen.policy))

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Tell the process and the policy what the plans brought."""
        super().observe(proposals, rewards)
        keep_actor = self._pretrained and self._played < self.warmup_episodes
        for actions, reward in zip(self._proposed, rewards, strict=False):
            self.agent.learn(actions.astype(np.float32), reward, keep_actor=keep_actor)

    def imagine(self, count: int, scale: float) -> np.ndarray:
        """Return changes of the best plan so far and noisy passes of the policy."""
        learnt = max(1, round(self.policy_share * count))
        noise = scale * self._generator.standard_normal((learnt, len(self._best)))
        passes = self.agent.act(noise).astype(float)
        return np.concatenate([super().imagine(count - learnt, scale), passes])

    def state(self) -> SelectorState:
        """Return the state of `bayes` and the agent's."""
        own = super().state()
        tensors, values = self.agent.state()
        prefixed = {f"agent.{name}": tensor for name, tensor in tensors.items()}
        return SelectorState({**own.tensors, **prefixed}, {**own.values, "agent": values})

    def restore(self, state: SelectorState) -> None:
        """Take over what `state` returned."""
        super().restore(state)
        prefix = "agent."
        tensors = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
        self.agent.restore(tensors, state.values["agent"])

    @classmethod
    def _agent_options(cls, options: Mapping[str, Any]) -> AgentOptions:
        """Return the policy's hyper-parameters; the features that a pretrained one sees are its own."""
        names = {"policy", "action", "importance_scale", "features", "hidden", "learning_rate"}
        given = {name: value for name, value in options.items() if name in names}
        if given.get("policy") is not None and tuple(given["features"]) == cls.default_options()["features"]:
            del given["features"]
        return agent_options(given)
