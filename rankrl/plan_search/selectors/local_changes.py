"""Select plans by hill climbing from greedy's plan, a strong baseline without learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankrl.options.selectors import LocalOptions
from rankrl.plan_search.envs.actions import ImportanceMap, check_action
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting

# Probability of each layer to be changed.
_SHARE = 0.3


@register_selector
class LocalSelector(Selector):
    """Random local changes of the best plan so far, beginning with greedy's.

    A change adds normal noise to the log-importance of a random share of the layers; the budget is then
    allocated anew. The actions are the agent's, without any learning.
    """

    name = "local"
    description = "random local changes of the best plan so far, from greedy's"
    own_options = LocalOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = LocalOptions(**options)
        self.step, self.plans_per_step = own.step, own.plans_per_step
        self._map = ImportanceMap(problem)
        self.action_kind = self._map.action
        self._best = np.zeros(len(problem.sites))
        self._best_reward = -np.inf

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        check_action("importance", setting=setting)

    def propose(self) -> list[Proposal]:
        """Change the best plan so far."""
        generator = self.generator()
        tried, phase = [self._best], "preset"
        if self.observed:
            tried, phase = [self._changed(generator) for _ in range(self.plans_per_step)], "local"
        return [Proposal(self._map.choices_of(actions), phase, tuple(actions.tolist())) for actions in tried]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        super().observe(proposals, rewards)
        for proposal, reward in zip(proposals, rewards, strict=True):
            if reward > self._best_reward:
                self._best, self._best_reward = np.array(proposal.actions), reward

    def _changed(self, generator: np.random.Generator) -> np.ndarray:
        changed = generator.random(len(self._best)) < _SHARE
        changed[generator.integers(len(self._best))] = True
        noise = self.step * generator.standard_normal(len(self._best))
        return np.clip(self._best + changed * noise, -1, 1)
