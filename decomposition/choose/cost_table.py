"""Costs of all candidates as arrays, and the cheapest way through them when neighbours share costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from decomposition.choose.budget import Budget

# Bisection steps for the share of a second budget in the price.
_MIXTURES = 8


class CostTable:
    """Costs of all candidates as arrays, padded to the longest site, and the cheapest way through them."""

    def __init__(self, sites: Sequence[CandidateSet], budget: Budget) -> None:
        width = max(map(len, sites))
        self.limits = budget.limits
        self.losses = np.full((len(sites), width), np.inf)
        self._costs = np.full((len(self.limits), len(sites), width), np.inf)
        for row, site in enumerate(sites):
            for costs, limit in zip(self._costs, self.limits, strict=True):
                costs[row, : len(site)] = site.cost(limit.measure)
            self.losses[row, : len(site)] = site.losses
        totals = np.array([limit.total for limit in self.limits])
        self.absent = ~np.isfinite(self._costs[0])
        self._shares = np.where(self.absent, 0.0, self._costs / totals[:, None, None])
        self._couplings = [_Coupling.of(sites, budget, site, width) for site in range(len(sites) - 1)]

    def shares(self, mixture: np.ndarray) -> np.ndarray:
        """Return the costs as shares of their budgets' totals, mixed."""
        mixed: np.ndarray = np.tensordot(mixture, self._shares, axes=1)
        return mixed

    def used(self, choices: np.ndarray) -> np.ndarray:
        """Return each budget's share that the choices (weightings, sites) use, shape (weightings, limits).

        It is at most 1 where a budget is kept.
        """
        rows = np.arange(len(self.losses))
        shares = []
        for row, (costs, limit) in enumerate(zip(self._costs, self.limits, strict=True)):
            spent = costs[rows, choices].sum(1)
            for site, coupling in enumerate(self._couplings):
                if coupling is not None:
                    spent = spent + coupling.paid(row, choices[:, site], choices[:, site + 1])
            kept = spent <= limit.available
            share = np.full(len(spent), np.inf) if limit.available <= 0 else spent / limit.available
            # Rounding must not reject a plan that meets its budget to the last bit.
            shares.append(np.where(kept, np.minimum(share, 1.0), np.maximum(share, np.nextafter(1.0, 2.0))))
        return np.stack(shares, axis=1)

    def least(self, values: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """Return the choices with the least sum of values and shared costs of neighbours.

        Uncoupled sites are independent; the best way through a chain of coupled sites is found exactly by
        dynamic programming (Viterbi 1967).
        """
        values = np.where(self.absent, np.inf, values)
        if all(coupling is None for coupling in self._couplings):
            return values.argmin(2)
        count = values.shape[1]
        # The sum of the best way to each candidate, and where it came from for each kind of the next site's.
        total, origins = values[:, 0], []
        for site, coupling in enumerate(self._couplings):
            if coupling is None:
                origins.append(total.argmin(1)[:, None])
                total = total.min(1)[:, None] + values[:, site + 1]
                continue
            ways = total[:, :, None] + coupling.priced(prices)
            origins.append(ways.argmin(1))
            total = ways.min(1)[:, coupling.kinds] + values[:, site + 1]
        rows = np.arange(len(values))
        choices = np.zeros((len(values), count), dtype=int)
        choices[:, -1] = total.argmin(1)
        for site in reversed(range(count - 1)):
            coupling, behind = self._couplings[site], choices[:, site + 1]
            choices[:, site] = origins[site][rows, 0 if coupling is None else coupling.kinds[behind]]
        return choices


@dataclass(frozen=True)
class _Coupling:
    """Shared costs of a site's candidates and the next site's, of which there are few kinds."""

    costs: np.ndarray
    shares: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, sites: Sequence[CandidateSet], budget: Budget, site: int, width: int) -> _Coupling | None:
        """Return the coupling of a site and the next, `None` where there is none."""
        couplings = [limit.coupling(sites, site) for limit in budget.limits]
        if all(coupling is None for coupling in couplings):
            return None
        nothing = np.zeros((len(sites[site]), len(sites[site + 1])))
        stacked = np.stack([nothing if coupling is None else coupling for coupling in couplings])
        columns, kinds = np.unique(stacked.reshape(-1, nothing.shape[1]), axis=1, return_inverse=True)
        costs = np.zeros((len(couplings), width, columns.shape[1]))
        costs[:, : len(nothing)] = columns.reshape(len(couplings), len(nothing), -1)
        padded = np.zeros(width, dtype=int)
        padded[: len(kinds)] = kinds.ravel()
        totals = np.array([limit.total for limit in budget.limits])
        return cls(costs, costs / totals[:, None, None], padded)

    def paid(self, limit: int, here: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Return the shared cost of choices of the site and of the next one, shape (weightings,)."""
        paid: np.ndarray = self.costs[limit][here, self.kinds[behind]]
        return paid

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Return the shares, priced (weightings, limits) and added up; shape (weightings, width, kinds)."""
        forbidden = np.isinf(self.shares)
        priced = np.tensordot(prices, np.where(forbidden, 0.0, self.shares), axes=1)
        priced[:, forbidden.any(0)] = np.inf  # whatever the price is
        return priced


def best_mixture(
    table: CostTable, weightings: int, choose: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return the best choices over all shares of two budgets in the price.

    Bisection lowers the share of the budget that is used less, until both are used equally or only one
    counts.
    """
    low, high = np.zeros(weightings), np.ones(weightings)
    best, highest = choose(np.tile([1.0, 0.0], (weightings, 1)))
    for step in range(_MIXTURES):
        second = np.ones(weightings) if step == 0 else (low + high) / 2
        choices, value = choose(np.stack([1 - second, second], axis=1))
        better = value > highest
        best, highest = np.where(better[:, None], choices, best), np.where(better, value, highest)
        if step > 0:
            used = table.used(choices)
            lower = used[:, 1] < used[:, 0]
            low, high = np.where(lower, low, second), np.where(lower, second, high)
    return best
