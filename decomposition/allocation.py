"""Spending a budget, or two at once, over all sites: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from torch import nn

from decomposition.candidates import CandidateSet, in_one_block, saved
from decomposition.cost import count_macs, count_parameters
from decomposition.errors import DecompositionError
from decomposition.inputs import ExampleInputs
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
        input_shape: ExampleInputs,
        measure: str,
        fraction: float,
    ) -> Budget:
        """Return a budget in parameters, MACs or bytes of a whole model.

        Args:
            model: The dense model.
            sites: The candidates of its sites.
            input_shape: Shape of one input without the batch axis, or a batch of inputs.
            measure: `params`, `macs` or `bytes`.
            fraction: Fraction of the model's cost to keep, in (0, 1].

        Raises:
            DecompositionError: If the fraction is outside (0, 1].
        """
        if measure == "macs":
            total = count_macs(model, input_shape)
        else:
            total = count_parameters(model) * (FLOAT_BYTES if measure == "bytes" else 1)
        return cls.of_total(total, sites, measure, fraction)

    @classmethod
    def of_total(cls, total: float, sites: Sequence[CandidateSet], measure: str, fraction: float) -> Budget:
        """Return a budget of a whole model that is known to cost so much.

        Args:
            total: What the dense model costs.
            sites: The candidates of its sites.
            measure: `params`, `macs` or `bytes`.
            fraction: Fraction of it to keep, in (0, 1].

        Raises:
            DecompositionError: If the fraction is outside (0, 1].
        """
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

    def coupled(self, sites: Sequence[CandidateSet]) -> bool:
        """Tell whether what a candidate costs, in any budget, depends on its neighbours'."""
        together = any(site.narrows or site.removal is not None for site in sites)
        return together or any(bool(each.borders) for each in self.limits)

    def coupling(self, sites: Sequence[CandidateSet], site: int) -> np.ndarray | None:
        """Return what candidates of a site and of the next one cost together beyond what each costs alone.

        It is the border between integers and floating point, less what the site saves because the next one
        does not read all of its outputs; infinite where the two do not go together, as where one of a block
        leaves the network and the other stays.

        Returns:
            Shape (candidates of the site, candidates of the next), in the unit of the measure; `None` where
            there is nothing.
        """
        here, behind = sites[site], sites[site + 1]
        one_block = in_one_block(here, behind)
        if not self.borders and behind.producer != here.name and not one_block:
            return None
        together = np.zeros((len(here), len(behind)))
        if self.borders:
            together += self.borders[site] * (here.integer[:, None] != behind.integer[None])
        if behind.producer == here.name:
            together -= here.saved(self.measure)[:, behind.levels]
        if one_block:
            together[here.leaving[:, None] != behind.leaving[None]] = np.inf
        return together

    def spent(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return the cost of the whole model with candidate `choices[j]` of `sites[j]`.

        It is infinite where candidates do not go together.
        """
        for (here, choice), (behind, chosen) in pairwise(zip(sites, map(int, choices), strict=True)):
            if in_one_block(here, behind) and here.leaving[choice] != behind.leaving[chosen]:
                return np.inf
        own = sum(float(site.cost(self.measure)[int(j)]) for site, j in zip(sites, choices, strict=True))
        return self.fixed + own + self.crossed(sites, choices) - saved(sites, choices, self.measure)

    def crossed(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return what the borders between integers and floating point cost under the choices."""
        if not self.borders:
            return 0.0
        integer = np.array([site.integer[int(j)] for site, j in zip(sites, choices, strict=True)])
        return float((integer[1:] != integer[:-1]) @ np.asarray(self.borders))

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
        if site > 0 and (before := self.coupling(sites, site - 1)) is not None:
            costs = costs + before[choices[site - 1]]
        if site < len(sites) - 1 and (behind := self.coupling(sites, site)) is not None:
            costs = costs + behind[:, choices[site + 1]]
        extra: np.ndarray = costs - costs[choices[site]]
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
                    f"({each.fixed:.10g} of them in what stays as it is); the least is "
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
        absent: Likewise where there is no candidate.
    """

    def __init__(self, sites: Sequence[CandidateSet], budget: Budget) -> None:
        width = max(map(len, sites))
        self.limits = budget.limits
        self.losses = np.full((len(sites), width), np.inf)
        self._costs = np.full((len(self.limits), len(sites), width), np.inf)
        for row, site in enumerate(sites):
            for costs, each in zip(self._costs, self.limits, strict=True):
                costs[row, : len(site)] = site.cost(each.measure)
            self.losses[row, : len(site)] = site.losses
        totals = np.array([each.total for each in self.limits])
        self.absent = ~np.isfinite(self._costs[0])
        self._shares = np.where(self.absent, 0.0, self._costs / totals[:, None, None])
        self._couplings = [_Coupling.of(sites, budget, site, width) for site in range(len(sites) - 1)]

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
        shares = []
        for limit, (costs, each) in enumerate(zip(self._costs, self.limits, strict=True)):
            spent = costs[rows, choices].sum(1)
            for site, coupling in enumerate(self._couplings):
                if coupling is not None:
                    spent = spent + coupling.paid(limit, choices[:, site], choices[:, site + 1])
            kept = spent <= each.available
            share = np.full(len(spent), np.inf) if each.available <= 0 else spent / each.available
            # Rounding must not turn a plan away that meets its budget to the last bit.
            shares.append(np.where(kept, np.minimum(share, 1.0), np.maximum(share, np.nextafter(1.0, 2.0))))
        return np.stack(shares, axis=1)

    def least(self, values: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """Return the choices with the least sum of values and of what neighbours cost together.

        Sites that are coupled to none are on their own; through a chain of coupled ones the best way is found
        exactly by dynamic programming (Viterbi 1967).

        Args:
            values: Shape (weightings, sites, width).
            prices: Price of each budget's cost, shape (weightings, limits).

        Returns:
            Shape (weightings, sites). Of equal candidates the first: the last one is the dense layer.
        """
        values = np.where(self.absent, np.inf, values)
        if all(each is None for each in self._couplings):
            return values.argmin(2)
        count = values.shape[1]
        # Of the best way to each candidate: its sum, and for each kind of the next site's where it came from.
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
    """What candidates of a site cost together with those of the next, which are of few kinds to it.

    Attributes:
        costs: In the unit of each budget, shape (limits, width, kinds); 0 where there is no candidate.
        shares: The same as shares of the budgets' totals.
        kinds: The kind of each of the next site's candidates, shape (width,).
    """

    costs: np.ndarray
    shares: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, sites: Sequence[CandidateSet], budget: Budget, site: int, width: int) -> _Coupling | None:
        """Return the coupling of a site and the next, `None` where there is none."""
        found = [each.coupling(sites, site) for each in budget.limits]
        if all(each is None for each in found):
            return None
        nothing = np.zeros((len(sites[site]), len(sites[site + 1])))
        stacked = np.stack([nothing if each is None else each for each in found])
        columns, kinds = np.unique(stacked.reshape(-1, nothing.shape[1]), axis=1, return_inverse=True)
        costs = np.zeros((len(found), width, columns.shape[1]))
        costs[:, : len(nothing)] = columns.reshape(len(found), len(nothing), -1)
        padded = np.zeros(width, dtype=int)
        padded[: len(kinds)] = kinds.ravel()
        totals = np.array([each.total for each in budget.limits])
        return cls(costs, costs / totals[:, None, None], padded)

    def paid(self, limit: int, here: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Return what choices of the site and of the next, shape (weightings,), cost together."""
        paid: np.ndarray = self.costs[limit][here, self.kinds[behind]]
        return paid

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Return the shares, priced (weightings, limits) and added up; shape (weightings, width, kinds)."""
        forbidden = np.isinf(self.shares)
        priced = np.tensordot(prices, np.where(forbidden, 0.0, self.shares), axes=1)
        priced[:, forbidden.any(0)] = np.inf  # whatever the price is
        return priced


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
