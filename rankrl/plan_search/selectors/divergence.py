"""Select plans by the sum of measured divergences of single layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decomposition.choose.allocation import allocate
from rankrl.errors import ConfigError
from rankrl.options.selectors import NoOptions
from rankrl.plan_search.envs.actions import check_action
from rankrl.plan_search.scores.evaluators import with_divergences
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.space.problem import SearchSetting

_ELSEWHERE = (
    "selector 'divergence' measures on images in this process: it goes neither with search.workers nor with "
    "a score of your own; leave search.workers null, or use selector=greedy"
)

# Batches of held-out images on which divergences are measured.
_BATCHES = 2


@register_selector
class DivergenceSelector(Selector):
    """Minimises the sum of the divergences measured with one layer alone compressed, within the budget.

    One plan, after some hundreds of forward passes of a few held-out images.
    """

    name = "divergence"
    description = "the least sum of divergences measured layer by layer (Lagrangian allocation)"
    seeded = False
    needs_weights = True
    own_options = NoOptions

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        check_action("importance", setting=setting)
        if setting.in_workers:
            raise ConfigError(_ELSEWHERE)

    def propose(self) -> list[Proposal]:
        """Measure, and return the plan, once."""
        if self.observed:
            return []
        problem = self.problem
        if problem.budget is None:
            raise ConfigError(f"selector {self.name!r} spends a budget and there is none; set budget.params")
        measured = None if problem.divergences is None else problem.divergences(_BATCHES)
        if measured is None:
            raise ConfigError(_ELSEWHERE)
        pairs = zip(problem.sites, measured, strict=True)
        choices = allocate([with_divergences(site, values) for site, values in pairs], problem.budget)
        return [Proposal(tuple(choices.tolist()), "one-shot")]
