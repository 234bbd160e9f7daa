"""Allocate a budget over layers: Lagrangian relaxation, dynamic programming on chains, exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decomposition.choose.budget import Budget
from decomposition.choose.candidates import CandidateSet
from decomposition.errors import DecompositionError

# Bisection steps for the share of a second budget in the price.
_MIXTURES = 8


class CostTable:
    """Costs of all candidates as arrays padded to the longest site, and the minimisation over them."""

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
        for row, site in enumerate(sites):
            self.absent[row, site.dense] |= site.must_change
        self._shares = np.where(self.absent, 0.0, self._costs / totals[:, None, None])
        self._couplings = [_Coupling.of(sites, budget, site, width) for site in range(len(sites) - 1)]

    def shares(self, mixture: np.ndarray) -> np.ndarray:
        """Return the costs as shares of their budgets' totals, as a mixture of two budgets."""
        mixed: np.ndarray = np.tensordot(mixture, self._shares, axes=1)
        return mixed

    def used(self, choices: np.ndarray) -> np.ndarray:
        """Return the share of each budget that choices (weightings, sites) use, 1 at most if kept."""
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
        """Minimise the sum of values and priced costs, along chains of coupled sites too (Viterbi 1967)."""
        values = np.where(self.absent, np.inf, values)
        if all(coupling is None for coupling in self._couplings):
            return values.argmin(2)
        count = values.shape[1]
        # Viterbi: the least sum up to each candidate, and its predecessor for each kind of the next site's.
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
    """Costs shared by candidates of two neighbouring sites; the next site's are grouped by equal costs."""

    costs: np.ndarray
    shares: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, sites: Sequence[CandidateSet], budget: Budget, site: int, width: int) -> _Coupling | None:
        """Return the coupling of a site and the next; `None` if their costs are independent."""
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
        """Return the cost shared by the chosen candidates of both sites, shape (weightings,)."""
        paid: np.ndarray = self.costs[limit][here, self.kinds[behind]]
        return paid

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Return the shared costs at the prices (weightings, limits); shape (weightings, width, kinds)."""
        forbidden = np.isinf(self.shares)
        priced = np.tensordot(prices, np.where(forbidden, 0.0, self.shares), axes=1)
        priced[:, forbidden.any(0)] = np.inf  # infeasible even at a price of 0
        return priced


def best_mixture(
    table: CostTable, weightings: int, choose: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return the best choices over all shares of two budgets in the price, by bisection."""
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


def cheapest_choices(sites: Sequence[CandidateSet], budget: Budget) -> np.ndarray:
    """Return the choices of least cost, shape (sites,); with two budgets the tighter one counts."""
    table = CostTable(sites, budget)
    if budget.also is None:
        return table.least(table.shares(np.ones((1, 1))), np.ones((1, 1)))[0]

    def cheapest(mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        choices = table.least(table.shares(mixture), mixture)
        return choices, -table.used(choices).max(1)

    return best_mixture(table, 1, cheapest)[0]


def least_fraction(sites: Sequence[CandidateSet], budget: Budget) -> float:
    """Return the smallest fraction of the first budget that any plan can reach."""
    alone = replace(budget, also=None)
    return budget.spent(sites, cheapest_choices(sites, alone)) / budget.total


def expected_loss(sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
    """Sum the layers' expected losses under one candidate of each."""
    return sum(float(site.losses[j]) for site, j in zip(sites, choices, strict=True))


def least_within(sites: Sequence[CandidateSet], budget: Budget, loss: float, *, steps: int = 10) -> float:
    """Bisect for the smallest fraction of the first budget whose allocation loses at most `loss`."""
    low, high = min(1.0, least_fraction(sites, budget)), 1.0
    for _ in range(steps if low < high else 0):
        middle = (low + high) / 2
        choices = allocate(sites, replace(budget, fraction=middle, also=None))
        low, high = (low, middle) if expected_loss(sites, choices) <= loss else (middle, high)
    return high


def _largest(single: Sequence[CandidateSet], measure: str) -> str:
    """Name the largest of the sites that have no choice, and the reason, as the end of a message."""
    if not single:
        return ""
    site = max(single, key=lambda site: float(site.cost(measure)[0]))
    return f". The largest layer that stays dense is {site.name!r}: {site.candidates[0].reason}"


def check_reachable(sites: Sequence[CandidateSet], budget: Budget) -> None:
    """Refuse a budget that no plan can reach."""
    single = [site for site in sites if len(site) == 1 and site.candidates[0].reason]
    for limit in budget.limits:
        least = least_fraction(sites, limit)
        if least > limit.fraction:
            raise DecompositionError(
                f"budget.{limit.measure}={limit.fraction} cannot be reached: with the cheapest ranks "
                f"everywhere {least * limit.total:.10g} of {limit.total:.10g} {limit.measure} remain "
                f"({limit.fixed:.10g} of them in what stays as it is); the least is "
                f"{np.ceil(least * 1e4) / 1e4:.4f}{_largest(single, limit.measure)}"
            )
    if budget.also is None:
        return
    choices = cheapest_choices(sites, budget)
    if not budget.kept(sites, choices):
        asked = " and ".join(f"budget.{limit.measure}={limit.fraction}" for limit in budget.limits)
        kept = " and ".join(
            f"{limit.spent(sites, choices) / limit.total:.4f} of the {limit.measure}"
            for limit in budget.limits
        )
        raise DecompositionError(
            f"{asked} can be reached one by one, but not found together: the nearest plan keeps {kept}; "
            "ask for a little more of either"
        )


# Bounds of the bisected log lambda: losses are scaled to at most 1, costs to shares of the total.
_STEPS_DOWN, _STEPS_UP = 60.0, 30.0
# 40 halvings resolve log lambda to 1e-10; 20, for many weightings at once, to 1e-4.
_BISECTIONS = 40
_QUICK_BISECTIONS = 20
_LEAST_GAIN = 1e-9
"""Share of the loss that an exchange has to gain, which rounding does not."""


def allocate(
    sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray | None = None
) -> np.ndarray:
    """Choose a candidate for every site to minimise the weighted squared errors within the budget.

    Minimises sum_l exp(w_l) importance_l error_l^2 + lambda cost_l with lambda found by bisection, then
    spends what the convex relaxation left over on the best gain per cost. Pairs of sites then exchange cost
    for as long as that lowers the loss: the best plan lies within the convex hull, and far from its corners
    where sites or candidates are few.

    Args:
        sites: The candidates of every site.
        budget: The budget; it always holds for the result.
        log_weights: Log-importance w of each site, shape (sites,); `None` for all zero. A common shift
            changes nothing.

    Returns:
        Index of the chosen candidate of every site, shape (sites,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    check_reachable(sites, budget)
    weights = np.zeros(len(sites)) if log_weights is None else np.asarray(log_weights, dtype=float)
    losses = [
        np.exp(weight) * site.losses for weight, site in zip(weights - weights.max(), sites, strict=True)
    ]

    def fill(choices: np.ndarray, mixture: np.ndarray) -> np.ndarray:
        filled = _fill(choices[0], losses, sites, budget, mixture[0])
        return _exchanged(filled, losses, sites, budget)[None]

    return _relaxed(sites, budget, weights[None], _BISECTIONS, fill)[0]


def allocate_many(sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray) -> np.ndarray:
    """Allocate for many weightings at once, without spending what the convex relaxation leaves over.

    Args:
        sites: The candidates of every site.
        budget: The budget; it holds for every result.
        log_weights: Log-importance of each site, shape (weightings, sites).

    Returns:
        Index of the chosen candidate of every site, shape (weightings, sites). `allocate` loses no more.

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    check_reachable(sites, budget)
    return _relaxed(sites, budget, log_weights, _QUICK_BISECTIONS)


def _relaxed(
    sites: Sequence[CandidateSet],
    budget: Budget,
    log_weights: np.ndarray,
    bisections: int,
    finish: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda choices, _: choices,
) -> np.ndarray:
    """Minimise the Lagrangian sum_l exp(w_l) loss_l + lambda cost, with the least lambda in budget."""
    table = CostTable(sites, budget)
    # A common factor does not change the argmin; it keeps exp and lambda within the range of floats.
    largest = max(float(table.losses[~table.absent].max()), 1e-300)
    relative = log_weights - log_weights.max(1, keepdims=True)
    weighted = np.exp(relative)[:, :, None] * (table.losses / largest)
    rows, fallback = np.arange(len(table.losses)), cheapest_choices(sites, budget)

    def choose(mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shares = table.shares(mixture)

        def at(logarithms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            prices = np.exp(logarithms)[:, None] * mixture
            choices = table.least(weighted + np.exp(logarithms)[:, None, None] * shares, prices)
            return choices, table.used(choices).max(1) > 1

        low, high = np.full(len(weighted), -_STEPS_DOWN), np.full(len(weighted), _STEPS_UP)
        for _ in range(bisections):
            middle = (low + high) / 2
            _, dear = at(middle)
            low, high = np.where(dear, middle, low), np.where(dear, high, middle)
        choices, dear = at(high)
        choices = finish(np.where(dear[:, None], fallback, choices), mixture)
        return choices, -weighted[np.arange(len(weighted))[:, None], rows, choices].sum(1)

    if budget.also is None:
        return choose(np.ones((len(weighted), 1)))[0]
    return best_mixture(table, len(weighted), choose)


def _fill(
    choices: np.ndarray,
    losses: Sequence[np.ndarray],
    sites: Sequence[CandidateSet],
    budget: Budget,
    mixture: np.ndarray,
) -> np.ndarray:
    """Spend the remaining budget greedily on the largest decrease of loss per cost, mixed of two budgets."""
    choices = choices.copy()
    left = budget.left(sites, choices)
    while True:
        best, rate = None, 0.0
        for layer, loss in enumerate(losses):
            extra, gain = budget.extra(sites, choices, layer), loss[int(choices[layer])] - loss
            price = budget.price(extra, mixture)
            for candidate in np.flatnonzero((extra <= left[:, None]).all(0) & (gain > 0)):
                value = gain[candidate] / max(price[candidate], 1e-9)
                if value > rate:
                    best, rate = (layer, int(candidate), extra[:, candidate]), value
        if best is None:
            return choices
        position, choice, paid = best
        left -= paid
        choices[position] = choice


def _exchanged(
    choices: np.ndarray, losses: Sequence[np.ndarray], sites: Sequence[CandidateSet], budget: Budget
) -> np.ndarray:
    """Change two sites at a time, the pair that gains most first, until no pair within the budget gains."""
    while True:
        better = _best_exchange(choices, losses, sites, budget)
        if better is None:
            return choices
        choices = better


def _best_exchange(
    choices: np.ndarray, losses: Sequence[np.ndarray], sites: Sequence[CandidateSet], budget: Budget
) -> np.ndarray | None:
    """Return the choices with the best pair of sites exchanged, or None if no exchange gains."""
    left = budget.left(sites, choices)
    extras = [budget.extra(sites, choices, site) for site in range(len(sites))]
    gains = [loss[choice] - loss for loss, choice in zip(losses, choices, strict=True)]
    useful = [_undominated(extra, gain) for extra, gain in zip(extras, gains, strict=True)]
    rising = [np.flatnonzero(each & (gain > 0)) for each, gain in zip(useful, gains, strict=True)]
    site_of = np.repeat(np.arange(len(sites)), [len(each) for each in rising])
    candidate_of = np.concatenate(rising)
    extra_of = np.concatenate([extra[:, each] for extra, each in zip(extras, rising, strict=True)], axis=1)
    gain_of = np.concatenate([gain[each] for gain, each in zip(gains, rising, strict=True)])
    best, partner = np.full(len(gain_of), -np.inf), np.zeros((len(gain_of), 2), dtype=int)
    for site, (extra, gain) in enumerate(zip(extras, gains, strict=True)):
        falling = np.flatnonzero(useful[site] & (gain <= 0))
        if not len(falling):
            continue
        fits = (extra_of[:, :, None] + extra[:, None, falling] <= left[:, None, None]).all(0)
        fits &= (site_of != site)[:, None]
        total = np.where(fits, gain_of[:, None] + gain[falling], -np.inf)
        most = total.argmax(1)
        highest = total[np.arange(len(total)), most]
        higher = highest > best
        best[higher] = highest[higher]
        partner[higher] = np.stack([np.full(len(total), site), falling[most]], axis=1)[higher]
    least = _LEAST_GAIN * sum(float(loss[choice]) for loss, choice in zip(losses, choices, strict=True))
    for index in np.argsort(-best, kind="stable")[: len(sites)]:
        if not best[index] > least:
            return None
        better, (other, candidate) = choices.copy(), partner[index]
        better[site_of[index]], better[other] = candidate_of[index], candidate
        if budget.kept(sites, better):  # costs shared by neighbours do not add up over single changes
            return better
    return None


def _undominated(extra: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Mark the Pareto-optimal candidates (more gain than any that cost no more; the first of equals)."""
    cheaper = (extra[:, :, None] <= extra[:, None, :]).all(0)  # entry (i, j): i costs no more than j
    better = cheaper & (gain[:, None] >= gain)
    ties = better & better.T
    better &= ~ties | np.triu(np.ones_like(ties), 1)
    return np.logical_not(better.any(axis=0))
