"""Select plans by covariance matrix adaptation (Hansen & Ostermeier 2001) with the library cmaes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankrl.errors import ConfigError
from rankrl.options.selectors import CMAESOptions
from rankrl.plan_search.envs.actions import ImportanceMap, check_action
from rankrl.plan_search.selectors.selector import Proposal, Selector, import_package, register_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting


@register_selector
class CMAESSelector(Selector):
    """CMA-ES (extra `cmaes`) over the agent's own actions, from greedy's plan.

    The first plan is greedy's; whole generations follow, around a mean that begins there.
    """

    name = "cmaes"
    description = "covariance matrix adaptation (cmaes) over the agent's actions"
    own_options = CMAESOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = CMAESOptions(**options)
        self._map = ImportanceMap(problem)
        self.action_kind = self._map.action
        layers = len(problem.sites)
        if layers < 2:
            raise ConfigError("selector=cmaes needs at least two layers to choose for; use selector=local")
        self._optimizer = import_package("cmaes", "cmaes", "the package cmaes").CMA(
            mean=np.zeros(layers),
            sigma=own.step,
            bounds=np.tile([-1.0, 1.0], (layers, 1)),
            population_size=own.population,
        )

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        import_package("cmaes", "cmaes", "the package cmaes")
        check_action("importance", setting=setting)

    def propose(self) -> list[Proposal]:
        """Return greedy's plan first, then whole generations."""
        if not self.observed:
            return [Proposal(tuple(self.problem.preset.tolist()), "preset")]
        self._optimizer.reseed_rng(int(self.generator().integers(2**32)))
        generation = [self._optimizer.ask() for _ in range(self._optimizer.population_size)]
        return [
            Proposal(self._map.choices_of(actions), "generation", tuple(actions.tolist()))
            for actions in generation
        ]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Tell a generation's rewards; one cut short by the end of the search is ignored."""
        if self.observed and len(rewards) == self._optimizer.population_size:
            pairs = zip(proposals, rewards, strict=True)
            self._optimizer.tell([(np.array(proposal.actions), -reward) for proposal, reward in pairs])
        super().observe(proposals, rewards)
