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
    """

    fraction: float
    measure: str
    total: float
    fixed: float

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
        cheapest = sum(float(site.cost(self.measure).min()) for site in sites)
        return (cheapest + self.fixed) / self.total


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
    costs = [site.cost(budget.measure).astype(float) for site in sites]
    losses = [
        np.exp(weight) * site.losses for weight, site in zip(weights - weights.max(), sites, strict=True)
    ]
    return _fill(choices, losses, costs, budget.available)


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


def _relaxed(
    sites: Sequence[CandidateSet], budget: Budget, log_weights: np.ndarray, bisections: int = _BISECTIONS
) -> np.ndarray:
    """Return argmin_j exp(w_l) loss_lj + lambda cost_lj with the least lambda that keeps the budget."""
    width = max(map(len, sites))
    costs = np.full((len(sites), width), np.inf)
    losses = np.full((len(sites), width), np.inf)
    for row, site in enumerate(sites):
        costs[row, : len(site)] = site.cost(budget.measure)
        losses[row, : len(site)] = site.losses
    # A common factor changes nothing; without it exp and lambda would leave the range of floats.
    largest = max(float(losses[np.isfinite(losses)].max()), 1e-300)
    relative = log_weights - log_weights.max(1, keepdims=True)
    weighted = np.exp(relative)[:, :, None] * (losses / largest)
    # Padding is never chosen: its loss is infinite at every lambda.
    shares = np.where(np.isfinite(costs), costs / budget.total, 0.0)
    cheapest = costs.argmin(1)
    rows = np.arange(len(sites))

    def choose(multipliers: np.ndarray) -> np.ndarray:
        # Of equal candidates the cheaper one: the last is the dense layer, so ties go to the first.
        return (weighted + multipliers[:, None, None] * shares).argmin(2)

    def too_dear(choices: np.ndarray) -> np.ndarray:
        return costs[rows, choices].sum(1) > budget.available

    low, high = np.full(len(weighted), -_STEPS_DOWN), np.full(len(weighted), _STEPS_UP)
    for _ in range(bisections):
        middle = (low + high) / 2
        dear = too_dear(choose(np.exp(middle)))
        low, high = np.where(dear, middle, low), np.where(dear, high, middle)
    choices = choose(np.exp(high))
    return np.where(too_dear(choices)[:, None], cheapest, choices)


def _fill(
    choices: np.ndarray, losses: Sequence[np.ndarray], costs: Sequence[np.ndarray], available: float
) -> np.ndarray:
    """Spend the remaining budget greedily on the largest decrease of loss per cost."""
    choices = choices.copy()
    left = available - sum(c[j] for c, j in zip(costs, choices, strict=True))
    while True:
        best, rate = None, 0.0
        for layer, (loss, cost) in enumerate(zip(losses, costs, strict=True)):
            now = int(choices[layer])
            extra, gain = cost - cost[now], loss[now] - loss
            for candidate in np.flatnonzero((extra <= left) & (gain > 0)):
                value = gain[candidate] / max(extra[candidate], 1e-9)
                if value > rate:
                    best, rate = (layer, int(candidate)), value
        if best is None:
            return choices
        position, chosen = best
        left -= costs[position][chosen] - costs[position][choices[position]]
        choices[position] = chosen
