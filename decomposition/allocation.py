"""Spending a budget, or two at once, over all sites: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from decomposition.candidates import CandidateSet
from decomposition.cost import count_macs, count_parameters
from decomposition.errors import DecompositionError
from decomposition.operations.base import FLOAT_BYTES

# The logarithm of lambda is bisected between these; losses are at most 1 and costs shares of the total.
_STEPS_DOWN, _STEPS_UP = 60.0, 30.0
_BISECTIONS = 40
_QUICK_BISECTIONS = 20
# Of the share that a second budget has in the price.
_MIXTURES = 8


@dataclass(frozen=True)
class Budget:
    """How much of the whole model's cost may be kept.

    Attributes:
        fraction: Kept fraction in (0, 1].
        measure: `params`, `macs`, `bytes` or `latency`.
        total: Cost of the whole dense model.
        fixed: Cost of everything that belongs to no site (batch norm, layers that stay as they are).
        borders: What is paid between a site and the next in forward order where one computes in integers and
            the other does not, one for each site but the last; empty where nothing is.
        also: A second budget that has to be kept as well, of another measure; None where there is none.
    """

    fraction: float
    measure: str
    total: float
    fixed: float
    borders: tuple[float, ...] = ()
    also: Budget | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} is outside (0, 1]; it is the fraction to keep, "
                "for example 0.4"
            )
        if self.also is not None and (self.also.also is not None or self.also.measure == self.measure):
            raise DecompositionError(
                f"budget.{self.measure} goes together with one other measure, got {self.also.measures}"
            )

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        sites: Sequence[CandidateSet],
        input_shape: Sequence[int],
        measure: str,
        fraction: float,
    ) -> Budget:
        """Return a budget in parameters, MACs or bytes of a whole model.

        Args:
            model: The dense model.
            sites: The candidates of its sites.
            input_shape: Shape of one input without the batch axis.
            measure: `params`, `macs` or `bytes`.
            fraction: Fraction of the model's cost to keep, in (0, 1].

        Raises:
            DecompositionError: If the fraction is outside (0, 1].
        """
        if measure == "macs":
            total = count_macs(model, input_shape)
        else:
            total = count_parameters(model) * (FLOAT_BYTES if measure == "bytes" else 1)
        covered = sum(int(site.cost(measure)[site.dense]) for site in sites)
        return cls(fraction, measure, total, total - covered)

    @property
    def limits(self) -> tuple[Budget, ...]:
        """The budgets that have to be kept, one or two."""
        return (self,) if self.also is None else (self, self.also)

    @property
    def measures(self) -> tuple[str, ...]:
        """What the budgets count."""
        return tuple(each.measure for each in self.limits)

    @property
    def available(self) -> float:
        """Cost that the sites may take together."""
        return self.fraction * self.total - self.fixed

    def between(self, integer: np.ndarray) -> np.ndarray:
        """Return what borders between integers and floating point cost.

        Args:
            integer: Whether each site computes in integers, boolean; shape (..., sites).

        Returns:
            Shape (...).
        """
        if not self.borders:
            return np.zeros(integer.shape[:-1])
        changes: np.ndarray = integer[..., 1:] != integer[..., :-1]
        return changes @ np.asarray(self.borders)

    def spent(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return the cost of the whole model with candidate `choices[j]` of `sites[j]`."""
        pairs = list(zip(sites, map(int, choices), strict=True))
        own = sum(float(site.cost(self.measure)[choice]) for site, choice in pairs)
        return self.fixed + own + float(self.between(np.array([site.integer[c] for site, c in pairs])))

    def left(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return what the choices leave over of each budget; negative where they exceed it.

        Returns:
            Shape (limits,), each in the unit of its measure.
        """
        return np.array([each.fraction * each.total - each.spent(sites, choices) for each in self.limits])

    def kept(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> bool:
        """Tell whether the choices stay within every budget."""
        return all(each.spent(sites, choices) <= each.fraction * each.total for each in self.limits)

    def extra(self, sites: Sequence[CandidateSet], choices: np.ndarray, site: int) -> np.ndarray:
        """Return what each candidate of a site would cost beyond the one that is chosen now.

        Args:
            sites: The candidates of every site.
            choices: Index of the chosen candidate of every site.
            site: Index of the site.

        Returns:
            Shape (limits, candidates of the site), each in the unit of its measure; 0 for the one that is
            chosen.
        """
        return np.stack([each._extra(sites, choices, site) for each in self.limits])

    def _extra(self, sites: Sequence[CandidateSet], choices: np.ndarray, site: int) -> np.ndarray:
        costs = sites[site].cost(self.measure).astype(float)
        extra: np.ndarray = costs - costs[choices[site]]
        if not self.borders:
            return extra
        integer = sites[site].integer
        for neighbour, border in ((site - 1, site - 1), (site + 1, site)):
            if 0 <= neighbour < len(sites):
                differs = integer != sites[neighbour].integer[choices[neighbour]]
                extra += self.borders[border] * (differs.astype(float) - float(differs[choices[site]]))
        return extra

    def price(self, extra: np.ndarray, mixture: Sequence[float] | np.ndarray | None = None) -> np.ndarray:
        """Return one number for each column of what `extra` returns, in the unit of the first budget.

        Args:
            extra: Shape (limits, candidates).
            mixture: Factor of each budget, shape (limits,); `None` counts all alike.
        """
        factors = np.ones(len(extra)) if mixture is None else np.asarray(mixture)
        units = [self.total / each.total for each in self.limits]
        price: np.ndarray = (factors * units) @ extra
        return price

    def check(self, sites: Sequence[CandidateSet]) -> None:
        """Refuse a budget that no plan can reach.

        Raises:
            DecompositionError: Naming the least fraction that can be reached; of two budgets that are out of
                reach only together, how near one comes to both.
        """
        for each in self.limits:
            least = each.least(sites)
            if least > each.fraction:
                raise DecompositionError(
                    f"budget.{each.measure}={each.fraction} cannot be reached: with the cheapest ranks "
                    f"everywhere {least * each.total:.10g} of {each.total:.10g} {each.measure} remain "
                    f"({each.fixed:.10g} where nothing can be decomposed); the least is "
                    f"{np.ceil(least * 1e4) / 1e4:.4f}"
                )
        if self.also is None:
            return
        choices = self.cheapest(sites)
        if not self.kept(sites, choices):
            asked = " and ".join(f"budget.{each.measure}={each.fraction}" for each in self.limits)
            found = " and ".join(
                f"{each.spent(sites, choices) / each.total:.4f} of the {each.measure}" for each in self.limits
            )
            raise DecompositionError(
                f"{asked} can be reached one by one, but not found together: the nearest plan keeps {found}; "
                "ask for a little more of either"
            )

    def least(self, sites: Sequence[CandidateSet]) -> float:
        """Return the smallest fraction that any plan can reach, without regard to a second budget."""
        alone = replace(self, also=None)
        return self.spent(sites, alone.cheapest(sites)) / self.total

    def cheapest(self, sites: Sequence[CandidateSet]) -> np.ndarray:
        """Return the choices of least cost, shape (sites,); of two budgets the dearer one counts."""
        table = _Table(sites, self)
        if self.also is None:
            return table.least(table.shares(np.ones((1, 1))), np.ones((1, 1)))[0]

        def cheapest(mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            choices = table.least(table.shares(mixture), mixture)
            return choices, -table.used(choices).max(1)

        return _best_mixture(table, 1, cheapest)[0]


def allocate(
    sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray | None = None
) -> np.ndarray:
    """Choose a candidate for every site so that the weighted squared errors are least within the budget.

    Minimises sum_l exp(w_l) importance_l error_l^2 + lambda cost_l with lambda found by bisection, then
    spends what the convex relaxation left over on the best gain per cost.

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
    budget.check(sites)
    weights = np.zeros(len(sites)) if log_weights is None else np.asarray(log_weights, dtype=float)
    losses = [
        np.exp(weight) * site.losses for weight, site in zip(weights - weights.max(), sites, strict=True)
    ]

    def fill(choices: np.ndarray, mixture: np.ndarray) -> np.ndarray:
        return _fill(choices[0], losses, sites, budget, mixture[0])[None]

    return _relaxed(sites, budget, weights[None], _BISECTIONS, fill)[0]


def allocate_many(sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray) -> np.ndarray:
    """Allocate for many weightings at once, without spending what the convex relaxation leaves over.

    Args:
        sites: The candidates of every site.
        budget: The budget; it holds for every result.
        log_weights: Log-importance of each site, shape (weightings, sites).

    Returns:
        Index of the chosen candidate of every site, shape (weightings, sites). `allocate` chooses the same
        or larger candidates.

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    budget.check(sites)
    return _relaxed(sites, budget, log_weights, _QUICK_BISECTIONS)


class _Table:
    """Costs of all candidates as arrays, padded to the longest site, and the cheapest way through them.

    Attributes:
        limits: The budgets.
        losses: Shape (sites, width); infinite where there is no candidate, so that none is chosen there.
        integer: Likewise which candidates compute in integers.
        absent: Likewise where there is no candidate.
    """

    def __init__(self, sites: Sequence[CandidateSet], budget: Budget) -> None:
        width = max(map(len, sites))
        self.limits = budget.limits
        self.losses = np.full((len(sites), width), np.inf)
        self.integer = np.zeros((len(sites), width), dtype=bool)
        self._costs = np.full((len(self.limits), len(sites), width), np.inf)
        for row, site in enumerate(sites):
            for costs, each in zip(self._costs, self.limits, strict=True):
                costs[row, : len(site)] = site.cost(each.measure)
            self.losses[row, : len(site)] = site.losses
            self.integer[row, : len(site)] = site.integer
        totals = np.array([each.total for each in self.limits])
        self.absent = ~np.isfinite(self._costs[0])
        self._shares = np.where(self.absent, 0.0, self._costs / totals[:, None, None])
        self._borders = [np.asarray(each.borders) / each.total for each in self.limits]

    def shares(self, mixture: np.ndarray) -> np.ndarray:
        """Return the costs as shares of their budgets' totals, mixed.

        Args:
            mixture: Factor of each budget, shape (weightings, limits).

        Returns:
            Shape (weightings, sites, width), 0 where there is no candidate.
        """
        mixed: np.ndarray = np.tensordot(mixture, self._shares, axes=1)
        return mixed

    def used(self, choices: np.ndarray) -> np.ndarray:
        """Return what the choices (weightings, sites) take of what is available, shape (weightings, limits).

        It is at most 1 where a budget is kept.
        """
        rows = np.arange(len(self.losses))
        integer = self.integer[rows, choices]
        shares = []
        for costs, each in zip(self._costs, self.limits, strict=True):
            spent = costs[rows, choices].sum(1) + each.between(integer)
            kept = spent <= each.available
            share = np.full(len(spent), np.inf) if each.available <= 0 else spent / each.available
            # Rounding must not turn a plan away that meets its budget to the last bit.
            shares.append(np.where(kept, np.minimum(share, 1.0), np.maximum(share, np.nextafter(1.0, 2.0))))
        return np.stack(shares, axis=1)

    def least(self, values: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """Return the choices with the least sum of values and of what borders cost.

        Without borders each site is on its own; with them the best way through the chain of sites is found
        exactly by dynamic programming over whether a site computes in integers (Viterbi 1967).

        Args:
            values: Shape (weightings, sites, width).
            prices: Price of each budget's cost, shape (weightings, limits).

        Returns:
            Shape (weightings, sites). Of equal candidates the first: the last one is the dense layer.
        """
        values = np.where(self.absent, np.inf, values)
        priced = [prices[:, j, None] * each for j, each in enumerate(self._borders) if each.size]
        if not priced:
            return values.argmin(2)
        borders = np.sum(priced, axis=0)
        split = [np.where(self.integer == state, values, np.inf) for state in (False, True)]
        best = np.stack([each.min(2) for each in split], axis=2)  # (weightings, sites, 2)
        choice = np.stack([each.argmin(2) for each in split], axis=2)
        weightings, count, _ = best.shape
        came = np.zeros((weightings, count, 2), dtype=int)
        total = best[:, 0]
        for site in range(1, count):
            # Whether to come from the other state: [.., s] is the sum on the way to state s.
            other = total[:, ::-1] + borders[:, site - 1, None]
            switch = other < total
            came[:, site] = np.where(switch, [1, 0], [0, 1])
            total = np.where(switch, other, total) + best[:, site]
        state = total.argmin(1)
        rows, states = np.arange(weightings), np.zeros((weightings, count), dtype=int)
        for site in reversed(range(count)):
            states[:, site] = state
            state = came[rows, site, state]
        return np.take_along_axis(choice, states[:, :, None], axis=2)[:, :, 0]


def _relaxed(
    sites: Sequence[CandidateSet],
    budget: Budget,
    log_weights: np.ndarray,
    bisections: int,
    finish: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda choices, _: choices,
) -> np.ndarray:
    """Return argmin of sum_l exp(w_l) loss_l + lambda cost with the least lambda that keeps the budget.

    Of two budgets the cost is a mixture, so that neither keeps anything that the other could use.

    Args:
        sites: The candidates of every site.
        budget: The budget.
        log_weights: w, shape (weightings, sites).
        bisections: How exactly lambda is found.
        finish: Improves choices (weightings, sites) at a mixture (weightings, limits).

    Returns:
        Shape (weightings, sites).
    """
    table = _Table(sites, budget)
    # A common factor changes nothing; without it exp and lambda would leave the range of floats.
    largest = max(float(table.losses[~table.absent].max()), 1e-300)
    relative = log_weights - log_weights.max(1, keepdims=True)
    weighted = np.exp(relative)[:, :, None] * (table.losses / largest)
    rows, fallback = np.arange(len(table.losses)), budget.cheapest(sites)

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
    return _best_mixture(table, len(weighted), choose)


def _best_mixture(
    table: _Table, weightings: int, choose: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return the best choices over the shares that two budgets have in the price.

    The share of the one that is used up less is lowered, by bisection, until both are used alike or one of
    them counts alone.

    Args:
        table: Costs of two budgets.
        weightings: How many choices are made at once.
        choose: Returns choices (weightings, sites) for a mixture (weightings, 2), and how good each is.
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
        position, chosen, paid = best
        left -= paid
        choices[position] = chosen
