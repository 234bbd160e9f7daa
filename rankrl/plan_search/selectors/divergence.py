"""The Lagrangian allocation over measured divergences: greedy without its model of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decomposition.choose.allocation import allocate
from rankrl.errors import ConfigError
from rankrl.plan_search.envs.actions import check_action
from rankrl.plan_search.scores.divergence import with_divergences
from rankrl.plan_search.selectors.base import Proposal, Selector, SelectorState
from rankrl.plan_search.selectors.registry import register_selector
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.plan_search.space.setting import SearchSetting

_ELSEWHERE = (
    "selector 'divergence' measures on images in this process: it goes neither with search.workers nor with "
    "a score of your own; leave search.workers null, or use selector=greedy"
)

# Batches of held-out images that divergences are measured on.
_BATCHES = 2


@register_selector
class DivergenceSelector(Selector):
    """Spends the budget where the network's answers move least when one layer alone is compressed.

    Every candidate of every layer is written into the otherwise dense network, and the divergence of its
    class probabilities measured on a few held-out images; the sum of these divergences is then minimised
    within the budget. One plan; each of the forward passes before it, some hundreds, is on few images.

    Args:
        problem: What to choose for; it needs a budget, and its `divergences`.
        seed: Not used.
        episodes: Not used.
    """

    name = "divergence"
    description = "the least sum of divergences measured layer by layer (Lagrangian allocation)"
    seeded = False

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self._done = False

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a search without a budget, or with workers."""
        check_action("importance", setting=setting)
        if setting.in_workers:
            raise ConfigError(_ELSEWHERE)

    def propose(self) -> list[Proposal]:
        """Measure, and return the plan, once."""
        if self._done:
            return []
        budget, measured = self.problem.budget, self.problem.divergences
        if budget is None:
            raise ConfigError("selector 'divergence' spends a budget and there is none; set budget.params")
        if measured is None:
            raise ConfigError(_ELSEWHERE)
        pairs = zip(self.problem.sites, measured(_BATCHES), strict=True)
        choices = allocate([with_divergences(site, values) for site, values in pairs], budget)
        return [Proposal(tuple(choices.tolist()), "one-shot")]

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Note that the plan was scored."""
        self._done = True

    def state(self) -> SelectorState:
        """Return whether the plan was scored."""
        return SelectorState(values={"done": self._done})

    def restore(self, state: SelectorState) -> None:
        """Take over whether the plan was scored."""
        self._done = bool(state.values["done"])
