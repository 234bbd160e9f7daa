"""Divergence of the network's answers when one layer alone is compressed, measured instead of derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from rankrl.plan_search.space.problem import Choices, SearchProblem


def each_alone(
    sites: Sequence[CandidateSet], measure: Callable[[Choices], float], only: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Measure candidates with all other sites dense.

    Where sites leave the network together, the last of them carries the effect of all.

    Args:
        sites: The candidates of every site.
        measure: Measures a plan.
        only: The candidate of every site that is measured alone; None for all candidates.

    Returns:
        For every site the measure under each of its candidates; shape (candidates,), 0 for the dense one and
        for those that are not measured.
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
    """Return the site with its whole curve of losses scaled to the divergence of one candidate.

    Args:
        site: The site.
        probe: The candidate.
        divergence: Its measured divergence. A site whose probe loses nothing stays as it is.
    """
    loss = float(site.losses[probe])
    return site if loss == 0 else replace(site, importance=site.importance * divergence / loss)
