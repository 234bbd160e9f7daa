"""Calibrate a table of layer latencies by the times of a few whole networks.

Layers timed one by one do not quite add up: tensors are cold or warm, additions of residual branches cost
more where precisions differ, and the memory layout that suits one layer does not suit another. The times of a
few whole networks under different plans give a correction factor for each kind of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from decomposition import Candidate, CandidateSet, LatencyTable

_PRIOR, _LATER_PRIOR = 0.1, 0.5
"""Weights of keeping a factor, where a network's relative error weighs 1: kinds in few plans keep theirs.

The plans on the way to a budget are alike, and timings of whole networks differ by several percent from one
time to another; the later weight spreads such an error over all kinds.
"""
_KINDS = 4
"""Dense and factorised, first in floating point, then in integers."""


@dataclass(frozen=True)
class Trial:
    """A whole network that was exported and timed."""

    parts: tuple[float, ...]
    time: float

    @classmethod
    def of(
        cls, table: LatencyTable, sites: Sequence[CandidateSet], candidates: Sequence[Candidate], time: float
    ) -> Trial:
        """Return the trial of a plan, a candidate for each site; their costs may come from another table."""
        indices = [
            next(j for j, other in enumerate(site.candidates) if other.content() == candidate.content())
            for site, candidate in zip(sites, candidates, strict=True)
        ]
        parts = np.zeros(_KINDS + 2)
        for site, index in zip(sites, indices, strict=True):
            parts[_kind(site.candidates[index])] += table.sites[site.name][index]
        for (site, index), (behind, other) in pairwise(zip(sites, indices, strict=True)):
            here, there = site.candidates[index], behind.candidates[other]
            if there.level and behind.producer == site.name:
                saved = table.sites[site.name][index] - table.narrowed[site.name][index][there.level - 1]
                parts[_kind(here)] -= saved
            if here.integer != there.integer and table.borders:
                parts[_KINDS] += table.borders[site.name]
        parts[-1] = table.rest
        return cls(tuple(parts.tolist()), time)


def correction(table: LatencyTable, first: Sequence[Trial], later: Sequence[Trial] = ()) -> np.ndarray:
    """Fit the factors, one for each part, with which sums come closest to the trials' times.

    They solve non-negative least squares on relative errors, regularised towards 1; a part that is in no
    trial keeps its factor.
    """
    factors = _factors(table, first, np.ones(_KINDS + 2), _PRIOR)
    return _factors(table, later, factors, _LATER_PRIOR)


def _factors(table: LatencyTable, trials: Sequence[Trial], around: np.ndarray, prior: float) -> np.ndarray:
    from scipy.optimize import nnls  # takes a third of a second

    rows = np.array([trial.parts for trial in trials]).reshape(-1, len(around)) * around
    rows = rows / (np.array([trial.time for trial in trials]) * table.total)[:, None]
    matrix = np.concatenate([rows, prior * np.eye(len(around))])
    targets = np.concatenate([np.ones(len(rows)), np.full(len(around), prior)])
    factors: np.ndarray = around * np.maximum(nnls(matrix, targets)[0], 1e-3)
    return factors


def corrected(table: LatencyTable, sites: Sequence[CandidateSet], factors: np.ndarray) -> LatencyTable:
    """Return a table whose times are multiplied by the factors of their kinds."""
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
    borders = {name: float(time * factors[_KINDS]) for name, time in table.borders.items()}
    rest = float(table.rest * factors[-1])
    return replace(table, sites=scaled, rest=rest, borders=borders, narrowed=narrowed)


def _kind(candidate: Candidate) -> int:
    rounds = candidate.computes_integers
    return 2 * int(rounds) + int(len(candidate.operations) > rounds)
