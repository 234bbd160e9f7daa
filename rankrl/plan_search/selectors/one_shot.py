"""The rank heuristics of `decomposition` as selectors: one plan, no learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from decomposition.choose.heuristics import get_heuristic, list_heuristics
from rankrl.errors import ConfigError
from rankrl.plan_search.selectors.base import Proposal, Selector, SelectorState
from rankrl.plan_search.space.problem import SearchProblem


def heuristic_choices(problem: SearchProblem, heuristic: str) -> np.ndarray:
    """Return the candidates that a heuristic takes, shape (layers,)."""
    if heuristic not in list_heuristics():
        raise ConfigError(f"there is no heuristic {heuristic!r}; known are {', '.join(list_heuristics())}")
    if problem.budget is None:
        raise ConfigError(
            f"selector {heuristic!r} spends a budget and there is none; set budget.params or budget.macs"
        )
    if heuristic == "greedy":
        return problem.preset
    if problem.library is None:
        raise ConfigError(f"selector {heuristic!r} looks into the fits; make the problem with its library")
    return get_heuristic(heuristic).choose(problem.library, problem.sites, problem.budget)


class OneShot(Selector):
    """Proposes the plan of one heuristic and is done."""

    seeded = False

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self._choices = tuple(heuristic_choices(problem, self.name).tolist())
        self._done = False

    def propose(self) -> list[Proposal]:
        """Return the plan, once."""
        return [] if self._done else [Proposal(self._choices, "one-shot")]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Note that the plan was scored."""
        self._done = True

    def state(self) -> SelectorState:
        """Return whether the plan was scored."""
        return SelectorState(values={"done": self._done})

    def restore(self, state: SelectorState) -> None:
        """Take over whether the plan was scored."""
        self._done = bool(state.values["done"])


@cache
def heuristic_selector(name: str) -> type[Selector]:
    """Return the selector that proposes the plan of a registered heuristic."""
    heuristic = get_heuristic(name)
    attributes = {"__doc__": heuristic.description, "name": name, "description": heuristic.description}
    return type(f"{name.title()}Selector", (OneShot,), attributes)
