"""Divergence of the network's answers when one layer alone is compressed, measured instead of derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from decomposition.choose.candidates import CandidateSet
from rankrl.plan_search.space.problem import Choices, SearchProblem

_MEASURED = 0.75
"""Share of the measured losses in the logarithm of `weighed` ones."""
_LARGEST_RATIO = 1e3
"""Of measured and predicted losses, and its inverse: a site that seems to lose nothing is not free."""


def each_alone(
    sites: Sequence[CandidateSet], measure: Callable[[Choices], float], only: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Measure candidates with all other sites dense.

    Where sites leave the network together, the last of them carries the effect of all.
    """
    dense = tuple(site.dense for site in sites)
    divergences = []
    for index, site in enumerate(sites):
        values = np.zeros(len(site))
        for choice in range(site.dense) if only is None else [only[index]]:
            if choice == site.dense or (
                site.candidates[choice].removed is not None and site.losses[choice] == 0
            ):
                continue
            values[choice] = measure((*dense[:index], choice, *dense[index + 1 :]))
        divergences.append(values)
    return divergences


def with_divergences(site: CandidateSet, divergences: np.ndarray) -> CandidateSet:
    """Return the site with losses that are divergences (candidates,) instead of weighted squared errors."""
    pairs = zip(site.candidates, divergences, strict=True)
    candidates = tuple(replace(candidate, error=float(value) ** 0.5) for candidate, value in pairs)
    return replace(site, candidates=candidates, importance=1.0)


def probes(problem: SearchProblem) -> list[int]:
    """Return the candidate of every site at which one divergence says how much the site counts.

    It is the cheapest one with a loss: where little is lost, as by greedy's choice, a few images do not tell
    the divergence from none, and the site would seem free. The dense one where no candidate has a loss.
    """
    found = []
    for site in problem.sites:
        lossy = np.flatnonzero((site.losses > 0) & ~site.removed)
        cheapest = site.cost(problem.measure)[lossy].argmin() if len(lossy) else None
        found.append(site.dense if cheapest is None else int(lossy[cheapest]))
    return found


def scaled(site: CandidateSet, probe: int, divergence: float) -> CandidateSet:
    """Return the site with its whole curve of losses scaled to the divergence of one candidate."""
    loss = float(site.losses[probe])
    return site if loss == 0 else replace(site, importance=site.importance * divergence / loss)


def weighed(
    sites: Sequence[CandidateSet], only: Sequence[int], divergences: Sequence[float]
) -> list[CandidateSet]:
    """Return the sites with losses between what was predicted of them and one measured divergence each.

    A site's importance is multiplied by the `_MEASURED`-th power of what was measured of one candidate over
    what was predicted, relative to the median site: a weighted geometric mean of both. The measured one
    knows what the layers behind make of an error, the predicted one what few images do not tell.
    """
    losses = np.array([site.losses[probe] for site, probe in zip(sites, only, strict=True)])
    measured, told = np.asarray(divergences, dtype=float), losses > 0
    if not measured[told].any():
        return list(sites)
    ratios = np.ones(len(sites))
    ratios[told] = measured[told] / losses[told]
    ratios[told] /= np.median(ratios[told & (measured > 0)])
    factors = ratios.clip(1 / _LARGEST_RATIO, _LARGEST_RATIO) ** _MEASURED
    pairs = zip(sites, factors.tolist(), strict=True)
    return [replace(site, importance=site.importance * factor) for site, factor in pairs]
