"""Select plans by measured divergences of single layers, summed or weighted by depth (LEMS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from decomposition import CandidateSet
from decomposition.choose.allocation import allocate
from rankrl.errors import ConfigError
from rankrl.options.selectors import LEMSOptions, NoOptions
from rankrl.plan_search.envs.actions import check_action
from rankrl.plan_search.scores.evaluators import probes, scaled, with_divergences
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.selectors.tpe import TPESelector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting

ELSEWHERE = (
    "selector {!r} measures on images in this process: it goes neither with search.workers nor with "
    "a score of your own; leave search.workers null, or use selector=greedy"
)

# Batches of held-out images on which divergences are measured.
_BATCHES = 2


def measured(
    problem: SearchProblem, selector: str, only: Sequence[int] | None = None
) -> Sequence[np.ndarray]:
    """Measure the divergences of a problem's candidates; refuse a problem where that is impossible."""
    if problem.budget is None:
        raise ConfigError(f"selector {selector!r} spends a budget and there is none; set budget.params")
    if problem.divergences is None:
        raise ConfigError(ELSEWHERE.format(selector))
    return problem.divergences(_BATCHES, only)


@register_selector
class DivergenceSelector(Selector):
    """Minimises the sum of the divergences measured with one layer alone compressed, within the budget.

    One plan, after some hundreds of forward passes of a few held-out images.
    """

    name = "divergence"
    description = "the least sum of divergences measured layer by layer (Lagrangian allocation)"
    seeded = False
    own_options = NoOptions

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a search without a budget, or with workers."""
        check_action("importance", setting=setting)
        if setting.in_workers:
            raise ConfigError(ELSEWHERE.format(cls.name))

    def propose(self) -> list[Proposal]:
        """Measure, and return the plan, once."""
        if self.observed:
            return []
        pairs = zip(self.problem.sites, measured(self.problem, self.name), strict=True)
        sites = [with_divergences(site, values) for site, values in pairs]
        assert self.problem.budget is not None
        choices = allocate(sites, self.problem.budget)
        return [Proposal(tuple(choices.tolist()), "one-shot")]


def depth_weights(layers: int, gamma: float, alpha: float) -> np.ndarray:
    """Return the weights of the layers' losses, (layers,): 1 for the last, 1 + gamma for the first.

    Layer l of L has 1 + gamma h_l: the sum of (k + 1)^-alpha over k = l, ..., L - 1, scaled to [0, 1].
    """
    sums = ((1.0 + np.arange(layers)) ** -alpha)[::-1].cumsum()[::-1]
    return 1 + gamma * (sums - sums[-1]) / max(sums[0] - sums[-1], 1e-12)  # 0 for a single layer


@register_selector
class LEMSSelector(TPESelector):
    """Layer-wise error model search (Thoma et al., ICML 2026), with Optuna's TPE (extra `tpe`).

    A layer's losses are scaled to one divergence, measured at its cheapest candidate, and weighted by depth.
    Weights and ranges of gamma and alpha are those of github.com/lems-svd/lems (`harmonicv2`); the Lagrangian
    allocation replaces the integer program. The first trial has gamma 0, TPE draws the others.
    """

    name = "lems"
    description = "one divergence a layer, weighted by a law of depth whose two numbers TPE looks for"
    own_options: ClassVar[type[LEMSOptions]] = LEMSOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes, **options)
        self._trials = self.own_options(**options).trials
        self._ranges = {"gamma": (0.0, 7.0), "alpha": (0.0, 3.0)}

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a search without a budget, with workers, or without the library."""
        super().check_setting(options, setting)
        if setting.in_workers:
            raise ConfigError(ELSEWHERE.format(cls.name))

    def propose(self) -> list[Proposal]:
        """Ask for trials, up to their maximum number."""
        left = self._trials - self.observed
        return super().propose()[:left] if left > 0 else []

    @cached_property
    def _sites(self) -> list[CandidateSet]:
        only = probes(self.problem)
        divergences = zip(self.problem.sites, only, measured(self.problem, self.name, only), strict=True)
        return [scaled(site, probe, float(values[probe])) for site, probe, values in divergences]

    def _allocate(self, actions: np.ndarray) -> np.ndarray:
        gamma, alpha = actions
        assert self.problem.budget is not None
        weights = depth_weights(len(self._sites), gamma, alpha)
        return allocate(self._sites, self.problem.budget, np.log(weights))
