"""Spending one budget over all sites: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    fraction: float
    measure: str
    total: float
    fixed: float
    borders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} is outside (0, 1]; it is the fraction to keep, "
                "for example 0.4"
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

    def left(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return what the choices leave over of the budget; negative where they exceed it."""
        return self.fraction * self.total - self.spent(sites, choices)

    def extra(self, sites: Sequence[CandidateSet], choices: np.ndarray, site: int) -> np.ndarray:
        """Return what each candidate of a site would cost beyond the one that is chosen now.

        Args:
            sites: The candidates of every site.
            choices: Index of the chosen candidate of every site.
            site: Index of the site.

        Returns:
            Shape (candidates of the site,); 0 for the one that is chosen.
        """
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

    def check(self, sites: Sequence[CandidateSet]) -> None:
        """Refuse a budget that no plan can reach.

        Raises:
            DecompositionError: Naming the least fraction that can be reached.
        """
        least = self.least(sites)
        if least > self.fraction:
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} cannot be reached: with the cheapest ranks "
                f"everywhere {least * self.total:.10g} of {self.total:.10g} {self.measure} remain "
                f"({self.fixed:.10g} where nothing can be decomposed); the least is "
                f"{np.ceil(least * 1e4) / 1e4:.4f}"
            )

    def least(self, sites: Sequence[CandidateSet]) -> float:
        """Return the smallest fraction that any plan can reach."""
        return self.spent(sites, self.cheapest(sites)) / self.total

    def cheapest(self, sites: Sequence[CandidateSet]) -> np.ndarray:
        """Return the choices of least cost, shape (sites,)."""
        table = _Table(sites, self)
        return table.least(table.shares[None], 1.0)[0]


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
    choices = _relaxed(sites, budget, weights[None])[0]
    losses = [
        np.exp(weight) * site.losses for weight, site in zip(weights - weights.max(), sites, strict=True)
    ]
    return _fill(choices, losses, sites, budget)


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
    return _relaxed(sites, budget, log_weights, bisections=_QUICK_BISECTIONS)


class _Table:
    """Costs of all candidates as arrays, padded to the longest site, and the cheapest way through them.

    Attributes:
        losses: Shape (sites, width); infinite where there is no candidate, so that none is chosen there.
        costs: Likewise.
        shares: Costs as shares of the budget's total, 0 where there is no candidate.
        integer: Which candidates compute in integers.
    """

    def __init__(self, sites: Sequence[CandidateSet], budget: Budget) -> None:
        width = max(map(len, sites))
        self.budget = budget
        self.costs = np.full((len(sites), width), np.inf)
        self.losses = np.full((len(sites), width), np.inf)
        self.integer = np.zeros((len(sites), width), dtype=bool)
        for row, site in enumerate(sites):
            self.costs[row, : len(site)] = site.cost(budget.measure)
            self.losses[row, : len(site)] = site.losses
            self.integer[row, : len(site)] = site.integer
        self.shares = np.where(np.isfinite(self.costs), self.costs / budget.total, 0.0)
        self.borders = np.asarray(budget.borders) / budget.total
        self.absent = ~np.isfinite(self.costs)

    def spent(self, choices: np.ndarray) -> np.ndarray:
        """Return what the sites cost together, shape (weightings,), for choices (weightings, sites)."""
        rows = np.arange(len(self.costs))
        return self.costs[rows, choices].sum(1) + self.budget.between(self.integer[rows, choices])

    def least(self, values: np.ndarray, multiplier: np.ndarray | float) -> np.ndarray:
        """Return the choices with the least sum of values and of multiplier * borders.

        Without borders each site is on its own; with them the best way through the chain of sites is found
        exactly by dynamic programming over whether a site computes in integers (Viterbi 1967).

        Args:
            values: Shape (weightings, sites, width).
            multiplier: Of the borders, a number or shape (weightings,).

        Returns:
            Shape (weightings, sites). Of equal candidates the first: the last one is the dense layer.
        """
        values = np.where(self.absent, np.inf, values)
        if not self.borders.size:
            return values.argmin(2)
        split = [np.where(self.integer == state, values, np.inf) for state in (False, True)]
        best = np.stack([each.min(2) for each in split], axis=2)  # (weightings, sites, 2)
        choice = np.stack([each.argmin(2) for each in split], axis=2)
        weightings, count, _ = best.shape
        price = np.broadcast_to(np.asarray(multiplier, dtype=float), (weightings,))
        came = np.zeros((weightings, count, 2), dtype=int)
        total = best[:, 0]
        for site in range(1, count):
            change = price * self.borders[site - 1]
            # Whether to come from the other state: [.., s] is the sum on the way to state s.
            other = total[:, ::-1] + change[:, None]
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
    sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray, bisections: int = _BISECTIONS
) -> np.ndarray:
    """Return argmin of sum_l exp(w_l) loss_l + lambda cost with the least lambda that keeps the budget."""
    table = _Table(sites, budget)
    # A common factor changes nothing; without it exp and lambda would leave the range of floats.
    largest = max(float(table.losses[~table.absent].max()), 1e-300)
    relative = log_weights - log_weights.max(1, keepdims=True)
    weighted = np.exp(relative)[:, :, None] * (table.losses / largest)

    def choose(multipliers: np.ndarray) -> np.ndarray:
        return table.least(weighted + multipliers[:, None, None] * table.shares, multipliers)

    def too_dear(choices: np.ndarray) -> np.ndarray:
        return table.spent(choices) > budget.available

    low, high = np.full(len(weighted), -_STEPS_DOWN), np.full(len(weighted), _STEPS_UP)
    for _ in range(bisections):
        middle = (low + high) / 2
        dear = too_dear(choose(np.exp(middle)))
        low, high = np.where(dear, middle, low), np.where(dear, high, middle)
    choices = choose(np.exp(high))
    return np.where(too_dear(choices)[:, None], budget.cheapest(sites), choices)


def _fill(
    choices: np.ndarray, losses: Sequence[np.ndarray], sites: Sequence[CandidateSet], budget: Budget
) -> np.ndarray:
    """Spend the remaining budget greedily on the largest decrease of loss per cost."""
    choices = choices.copy()
    left = budget.left(sites, choices)
    while True:
        best, rate = None, 0.0
        for layer, loss in enumerate(losses):
            extra, gain = budget.extra(sites, choices, layer), loss[int(choices[layer])] - loss
            for candidate in np.flatnonzero((extra <= left) & (gain > 0)):
                value = gain[candidate] / max(extra[candidate], 1e-9)
                if value > rate:
                    best, rate = (layer, int(candidate), float(extra[candidate])), value
        if best is None:
            return choices
        position, chosen, paid = best
        left -= paid
        choices[position] = chosen
