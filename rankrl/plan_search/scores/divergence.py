"""What each layer's compression alone does to the network's answers, measured instead of derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from rankrl.plan_search.space.problem import Choices


def each_alone(sites: Sequence[CandidateSet], measure: Callable[[Choices], float]) -> list[np.ndarray]:
    """Measure what every candidate does where all other sites are dense.

    Where a site leaves the network with others, all they do is put down to the last of them.

    Args:
        sites: The candidates of every site.
        measure: What a plan does.

    Returns:
        For every site the measure under each of its candidates; shape (candidates,), 0 for the dense one.
    """
    dense = tuple(site.dense for site in sites)
    found = []
    for index, site in enumerate(sites):
        values = np.zeros(len(site))
        for choice in range(site.dense):
            if site.candidates[choice].removed is not None and site.losses[choice] == 0:
                continue
            values[choice] = measure((*dense[:index], choice, *dense[index + 1 :]))
        found.append(values)
    return found


def with_divergences(site: CandidateSet, divergences: np.ndarray) -> CandidateSet:
    """Return the site with losses that are divergences (candidates,) instead of weighted squared errors."""
    pairs = zip(site.candidates, divergences, strict=True)
    candidates = tuple(replace(candidate, error=float(value) ** 0.5) for candidate, value in pairs)
    return replace(site, candidates=candidates, importance=1.0)
