"""Spending a budget, or two at once, over all sites: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from decomposition.choose.budget import Budget
from decomposition.choose.cost_table import CostTable, best_mixture
from decomposition.choose.reachable import cheapest_choices, check_reachable

# The logarithm of lambda is bisected between these; losses are at most 1 and costs shares of the total.
_STEPS_DOWN, _STEPS_UP = 60.0, 30.0
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
    """Return argmin of sum_l exp(w_l) loss_l + lambda cost with the least lambda that keeps the budget.

    With two budgets the cost is a mixture, so that neither budget is left unused.
    """
    table = CostTable(sites, budget)
    # A common factor changes nothing, and it keeps exp and lambda within the range of floats.
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
    """Return the choices with two sites changed, one of which loses less, or None where no two gain."""
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
        if budget.kept(sites, better):  # what neighbours cost together is not the sum of both
            return better
    return None


def _undominated(extra: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Tell which candidates gain more than all that cost no more; of equal ones, which comes first."""
    cheaper = (extra[:, :, None] <= extra[:, None, :]).all(0)  # the first one than the second
    better = cheaper & (gain[:, None] >= gain)
    ties = better & better.T
    better &= ~ties | np.triu(np.ones_like(ties), 1)
    return np.logical_not(better.any(axis=0))
