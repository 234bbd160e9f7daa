"""Divergence of the network's answers when one layer alone is compressed, measured instead of derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from rankrl.plan_search.space.problem import Choices


def each_alone(sites: Sequence[CandidateSet], measure: Callable[[Choices], float]) -> list[np.ndarray]:
    """Measure every candidate with all other sites dense.

    Where sites leave the network together, the last of them carries the effect of all.

    Args:
        sites: The candidates of every site.
        measure: Measures a plan.

    Returns:
        For every site the measure under each of its candidates; shape (candidates,), 0 for the dense one.
    """
    dense = tuple(site.dense for site in sites)
    divergences = []
    for index, site in enumerate(sites):
        values = np.zeros(len(site))
        for choice in range(site.dense):
            if site.candidates[choice].removed is not None and site.losses[choice] == 0:
                continue
            values[choice] = measure((*dense[:index], choice, *dense[index + 1 :]))
        divergences.append(values)
    return divergences


def with_divergences(site: CandidateSet, divergences: np.ndarray) -> CandidateSet:
    """Return the site with losses that are divergences (candidates,) instead of weighted squared errors."""
    pairs = zip(site.candidates, divergences, strict=True)
    candidates = tuple(replace(candidate, error=float(value) ** 0.5) for candidate, value in pairs)
    return replace(site, candidates=candidates, importance=1.0)
