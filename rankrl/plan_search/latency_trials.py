"""Whole networks that are timed before a search, under plans of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from decomposition import CandidateSet, LatencyTable, allocate
from decomposition.choose.reachable import least_fraction
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.timing.correction import Trial

_SHARES = (0.15, 0.35, 0.6, 0.85)
"""Where plans are tried on the way from the fastest plan to the dense network."""


def first_trials(
    table: LatencyTable,
    sites: Sequence[CandidateSet],
    measured: Callable[[Sequence[CandidateSet], np.ndarray], float],
) -> list[Trial]:
    """Time the best and random plans of several budgets.

    Args:
        table: The measured layers.
        sites: Their candidates.
        measured: Time of the network under some choices, as a fraction of the dense one's.
    """
    attached = table.attach(sites)
    least = least_fraction(attached, table.budget(1.0, sites))
    generator = np.random.default_rng(0)
    plans = []
    for share in _SHARES:
        budget = table.budget(min(1.0, least + share * max(0.0, 1 - least) + 1e-9), sites)
        plans += [allocate(attached, budget), spend_at_random(attached, budget, generator)]
    trials = [Trial.of(table, sites, [site.candidates[site.dense] for site in attached], 1.0)]
    for plan in plans:
        candidates = [site.candidates[index] for site, index in zip(attached, plan, strict=True)]
        trials.append(Trial.of(table, sites, candidates, measured(attached, plan)))
    return trials
