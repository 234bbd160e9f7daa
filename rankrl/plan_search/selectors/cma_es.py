"""Select plans by covariance matrix adaptation (Hansen & Ostermeier 2001) with the library cmaes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rankrl.errors import ConfigError
from rankrl.options.selectors import CMAESOptions
from rankrl.plan_search.envs.actions import ImportanceMap, check_action
from rankrl.plan_search.selectors.selector import (
    Proposal,
    Selector,
    SelectorState,
    import_package,
    register_selector,
)
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting


@register_selector
class CMAESSelector(Selector):
    """CMA-ES (extra `cmaes`) over the agent's own actions, from greedy's plan.

    The first plan is greedy's; whole generations follow, around a mean that begins there. The rewards told so
    far suffice to resume exactly: the generations are drawn again from the seed.

    Args:
        problem: What to choose for; it needs a budget and at least two layers.
        seed: Seed of the draws.
        episodes: Not used.
        **options: Those of `CMAESOptions`.

    Raises:
        ConfigError: cmaes is not installed, or the problem has no budget or one layer alone.
    """

    name = "cmaes"
    description = "covariance matrix adaptation (cmaes) over the agent's actions"
    own_options = CMAESOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = CMAESOptions(**options)
        self._map = ImportanceMap(problem)
        layers = len(problem.sites)
        if layers < 2:
            raise ConfigError("selector=cmaes needs at least two layers to choose for; use selector=local")
        self._optimizer = import_package("cmaes", "cmaes", "the package cmaes").CMA(
            mean=np.zeros(layers),
            sigma=own.step,
            bounds=np.tile([-1.0, 1.0], (layers, 1)),
            seed=seed % 2**32,
            population_size=own.population,
        )
        self._pending: list[np.ndarray] = []
        self._told: list[float] = []

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a search without a budget, or without the library."""
        import_package("cmaes", "cmaes", "the package cmaes")
        check_action("importance", setting=setting)

    def propose(self) -> list[Proposal]:
        """Return greedy's plan first, then whole generations."""
        if not self._told:
            return [Proposal(tuple(self.problem.preset.tolist()), "preset")]
        self._pending = self._ask()
        return [
            Proposal(tuple(self._map.allocate(actions).tolist()), "generation") for actions in self._pending
        ]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Tell a generation's rewards; one cut short by the end of the search is ignored."""
        if self._told and len(rewards) == len(self._pending):
            self._tell(self._pending, rewards)
        self._told.extend(rewards)

    def state(self) -> SelectorState:
        """Return the rewards told so far."""
        return SelectorState({"rewards": torch.tensor(self._told, dtype=torch.float64)})

    def restore(self, state: SelectorState) -> None:
        """Draw the generations again and tell their rewards."""
        self._told = state.tensors["rewards"].tolist()
        size = self._optimizer.population_size
        for first in range(1, len(self._told) - size + 1, size):
            self._tell(self._ask(), self._told[first : first + size])

    def _ask(self) -> list[np.ndarray]:
        return [self._optimizer.ask() for _ in range(self._optimizer.population_size)]

    def _tell(self, generation: Sequence[np.ndarray], rewards: Sequence[float]) -> None:
        self._optimizer.tell([(each, -reward) for each, reward in zip(generation, rewards, strict=True)])
