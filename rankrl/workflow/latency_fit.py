"""Making sums of layers' times agree with whole networks: a table of latencies corrected by a few of them.

Layers timed one by one do not quite add up: tensors are cold or warm, additions of residual branches cost
more where precisions differ, and what one layer's shape suits another's does not. A handful of whole
networks under different plans, exported and timed, says by how much each kind of time is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from decomposition import Candidate, CandidateSet, LatencyTable, allocate
from rankrl.selectors.random_plans import spend_at_random

_PRIOR = 0.1
"""Weight of factors of 1 beside a network's relative error: a kind that few plans hold stays as it is."""
_SHARES = (0.15, 0.35, 0.6, 0.85)
"""Of the way from the fastest plan to the dense network, where plans are tried."""


def corrected(
    table: LatencyTable,
    sites: Sequence[CandidateSet],
    measured: Callable[[Sequence[CandidateSet], np.ndarray], float],
) -> LatencyTable:
    """Return a table whose sums come closest to whole networks'.

    Times of dense and factorised layers, in floating point and in integers, the borders between them and the
    rest are multiplied by one factor each, found by non-negative least squares on relative errors.

    Args:
        table: The measured layers.
        sites: Their candidates.
        measured: Time of the network under some choices, as a fraction of the dense one's.
    """
    attached = table.attach(sites)
    plans = [np.array([site.dense for site in attached])]
    least = table.budget(1.0, sites).least(attached)
    generator = np.random.default_rng(0)
    for share in _SHARES:
        budget = table.budget(min(1.0, least + share * max(0.0, 1 - least) + 1e-9), sites)
        plans += [allocate(attached, budget), spend_at_random(attached, budget, generator)]
    times = [1.0, *(measured(attached, plan) for plan in plans[1:])]
    rows = (
        np.array([_parts(table, attached, plan) for plan in plans]) / (np.array(times) * table.total)[:, None]
    )
    # Factors are found around 1: kinds that no plan holds keep theirs.
    kinds = rows.shape[1]
    matrix = np.concatenate([rows, _PRIOR * np.eye(kinds)])
    factors, _ = nnls(matrix, np.concatenate([np.ones(len(rows)), np.full(kinds, _PRIOR)]))
    factors = np.maximum(factors, 1e-3)
    scaled = {
        site.name: tuple(
            time * factors[_kind(candidate)]
            for candidate, time in zip(site.candidates, table.sites[site.name], strict=True)
        )
        for site in sites
    }
    narrowed = {
        site.name: tuple(
            tuple(time * factors[_kind(candidate)] for time in times)
            for candidate, times in zip(site.candidates, table.narrowed[site.name], strict=True)
        )
        for site in sites
        if site.name in table.narrowed
    }
    borders = {name: float(time * factors[4]) for name, time in table.borders.items()}
    return replace(
        table, sites=scaled, rest=float(table.rest * factors[5]), borders=borders, narrowed=narrowed
    )


def _kind(candidate: Candidate) -> int:
    """Number the kinds: dense and factorised, first in floating point, then in integers."""
    return 2 * int(candidate.integer) + int(len(candidate.operations) > candidate.integer)


def _parts(table: LatencyTable, sites: Sequence[CandidateSet], choices: np.ndarray) -> np.ndarray:
    """Return the sums of the four kinds of layers, of borders, and the rest, in the table's unit."""
    parts = np.zeros(6)
    for site, choice in zip(sites, choices, strict=True):
        candidate = site.candidates[choice]
        parts[_kind(candidate)] += site.cost("latency")[choice]
    for (site, choice), (behind, chosen) in pairwise(zip(sites, choices, strict=True)):
        if behind.producer == site.name:
            parts[_kind(site.candidates[choice])] -= site.saved("latency")[choice, behind.levels[chosen]]
    parts[4] = table.budget(1.0, sites).crossed(sites, choices)
    parts[5] = table.rest
    return parts
