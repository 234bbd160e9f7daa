"""The agents as selectors: ddpg, td3 and sac."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rankrl.agents import AgentOptions, Episode, RankAgent
from rankrl.errors import ConfigError
from rankrl.option_types import parameter_types
from rankrl.plan_search.problem import SearchProblem
from rankrl.selectors.base import Proposal, Selector, SelectorState
from rankrl.selectors.registry import register_selector


class ReinforcementSelector(Selector):
    """Lets a `RankAgent` choose; its options are those of `AgentOptions`."""

    def __init__(
        self,
        problem: SearchProblem,
        *,
        seed: int,
        episodes: int,
        **options: Any,
    ) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self.agent = RankAgent(problem, self.name, _agent_options(options), seed=seed, episodes=episodes)
        self._episodes: list[Episode] = []

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Return the hyper-parameters of the agent."""
        return asdict(AgentOptions())

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """Return the types of the agent's hyper-parameters."""
        return parameter_types(AgentOptions)

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters out of their ranges."""
        _agent_options(options)

    def propose(self) -> list[Proposal]:
        """Play episodes."""
        self._episodes = [self.agent.play() for _ in range(self.agent.options.plans_per_step)]
        return [Proposal(episode.plan, episode.phase) for episode in self._episodes]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Learn from the episodes played last."""
        if len(rewards) > len(self._episodes):
            raise ConfigError(f"{len(rewards)} rewards for {len(self._episodes)} episodes; propose first")
        self.agent.learn(self._episodes[: len(rewards)], rewards)

    def state(self) -> SelectorState:
        """Return the agent's state."""
        return SelectorState(*self.agent.state())

    def restore(self, state: SelectorState) -> None:
        """Take over the agent's state."""
        self.agent.restore(state.tensors, state.values)


def _agent_options(options: Mapping[str, Any]) -> AgentOptions:
    """Return hyper-parameters from plain values, whose lists are tuples there."""
    lists = {name: tuple(options[name]) for name in ("features", "hidden") if name in options}
    return AgentOptions(**{**options, **lists})


@register_selector
class DDPGSelector(ReinforcementSelector):
    """Deep deterministic policy gradient (Lillicrap et al., ICLR 2016)."""

    name = "ddpg"
    description = "deep deterministic policy gradient with an ensemble of critics, from greedy's plan"


@register_selector
class TD3Selector(ReinforcementSelector):
    """Twin delayed DDPG (Fujimoto et al., ICML 2018)."""

    name = "td3"
    description = "DDPG whose actor learns at every other step"


@register_selector
class SACSelector(ReinforcementSelector):
    """Soft actor-critic (Haarnoja et al., ICML 2018)."""

    name = "sac"
    description = "soft actor-critic: a stochastic policy that is paid for entropy"
