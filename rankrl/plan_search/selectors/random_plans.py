"""Draw random plans that spend the budget, the baseline of all selectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decomposition import Budget, CandidateSet
from decomposition.choose.allocation import cheapest_choices
from rankrl.options.selectors import StepOptions
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.space.problem import SearchProblem


def random_choices(problem: SearchProblem, generator: np.random.Generator) -> np.ndarray:
    """Draw candidates that keep the budget and spend it: no layer's next larger candidate would still fit.

    Layers are visited in random order, each drawing among what leaves the others their cheapest; removable
    blocks go with probability 1/2, or more where the budget requires it.
    """
    if problem.budget is None:
        return np.array([generator.integers(len(site)) for site in problem.sites])
    return spend_at_random(problem.sites, problem.budget, generator)


def spend_at_random(
    sites: Sequence[CandidateSet], budget: Budget, generator: np.random.Generator
) -> np.ndarray:
    """Draw choices like `random_choices`, for sites and a budget without a problem."""
    choices = _some_blocks_restored(sites, budget, cheapest_choices(sites, budget), generator)
    left = budget.left(sites, choices)
    for layer in generator.permutation(len(sites)):
        extra = budget.extra(sites, choices, layer)
        drawn = generator.choice(_fitting(extra, left))
        left -= extra[:, drawn]
        choices[layer] = drawn
    for layer in generator.permutation(len(sites)):
        extra = budget.extra(sites, choices, layer)
        fitting = _fitting(extra, left)
        drawn = fitting[budget.price(extra)[fitting].argmax()]
        left -= extra[:, drawn]
        choices[layer] = drawn
    return choices


def _some_blocks_restored(
    sites: Sequence[CandidateSet], budget: Budget, choices: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Restore removed blocks at their least cost, each with probability 1/2, while the budget is kept."""
    removed = [site.candidates[int(choice)].removed for site, choice in zip(sites, choices, strict=True)]
    blocks = [each for each in dict.fromkeys(removed) if each is not None]
    for number in generator.permutation(len(blocks)):
        restored = choices.copy()
        for position, site in enumerate(sites):
            if site.removal == blocks[number]:
                staying = np.flatnonzero(~site.removed)
                restored[position] = staying[site.cost(budget.measure)[staying].argmin()]
        if generator.random() < 0.5 and budget.kept(sites, restored):
            choices = restored
    return choices


def _fitting(extra: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the candidates whose extra costs (limits, candidates) fit into the rest of every budget."""
    return np.flatnonzero((extra <= np.maximum(left, 0.0)[:, None]).all(0))


@register_selector
class RandomSelector(Selector):
    """Independent random plans that spend the budget."""

    name = "random"
    description = "independent random plans that spend the budget"
    own_options = StepOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self.plans_per_step = StepOptions(**options).plans_per_step

    def propose(self) -> list[Proposal]:
        generator = self.generator()
        return [
            Proposal(tuple(random_choices(self.problem, generator).tolist()), "random")
            for _ in range(self.plans_per_step)
        ]
