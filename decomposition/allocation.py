"""Spending one budget over all layers: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decomposition.curves import RankCurve
from decomposition.errors import DecompositionError

# The logarithm of lambda is bisected between these; losses are at most 1 and costs shares of the total.
_STEPS_DOWN, _STEPS_UP = 60.0, 30.0
_BISECTIONS = 40
_QUICK_BISECTIONS = 20


@dataclass(frozen=True)
class Budget:
    """How much of the whole model's cost may be kept.

    Attributes:
        fraction: Kept fraction in (0, 1].
        measure: `params`, `macs` or `latency`.
        total: Cost of the whole dense model.
        fixed: Cost of everything that no curve covers (batch norm, layers that stay as they are).
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

    @property
    def available(self) -> float:
        """Cost that the layers with curves may take together."""
        return self.fraction * self.total - self.fixed

    def check(self, curves: Sequence[RankCurve]) -> None:
        """Refuse a budget that no plan can reach.

        Raises:
            DecompositionError: Naming the least fraction that can be reached.
        """
        least = self.least(curves)
        if least > self.fraction:
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} cannot be reached: with the cheapest ranks "
                f"everywhere {least * self.total:.10g} of {self.total:.10g} {self.measure} remain "
                f"({self.fixed:.10g} where nothing can be decomposed); the least is "
                f"{np.ceil(least * 1e4) / 1e4:.4f}"
            )

    def least(self, curves: Sequence[RankCurve]) -> float:
        """Return the smallest fraction that any plan can reach."""
        cheapest = sum(float(curve.cost(self.measure).min()) for curve in curves)
        return (cheapest + self.fixed) / self.total


def allocate(
    curves: Sequence[RankCurve], budget: Budget, log_weights: np.ndarray | None = None
) -> np.ndarray:
    """Choose a candidate a layer so that the weighted squared errors are least within the budget.

    Minimises sum_l exp(w_l) importance_l error_l^2 + lambda cost_l with lambda found by bisection, then
    spends what the convex relaxation left over on the best gain per cost.

    Args:
        curves: One curve a layer.
        budget: The budget; it always holds for the result.
        log_weights: Log-importance w of each layer, shape (layers,); `None` for all zero. A common shift
            changes nothing.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    budget.check(curves)
    weights = np.zeros(len(curves)) if log_weights is None else np.asarray(log_weights, dtype=float)
    choices = _relaxed(curves, budget, weights[None])[0]
    costs = [curve.cost(budget.measure).astype(float) for curve in curves]
    losses = [
        np.exp(weight) * curve.losses for weight, curve in zip(weights - weights.max(), curves, strict=True)
    ]
    return _fill(choices, losses, costs, budget.available)


def allocate_many(curves: Sequence[RankCurve], budget: Budget, log_weights: np.ndarray) -> np.ndarray:
    """Allocate for many weightings at once, without spending what the convex relaxation leaves over.

    Args:
        curves: One curve a layer.
        budget: The budget; it holds for every result.
        log_weights: Log-importance of each layer, shape (weightings, layers).

    Returns:
        Index of the chosen candidate of every curve, shape (weightings, layers). `allocate` chooses the same
        or larger candidates.

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    budget.check(curves)
    return _relaxed(curves, budget, log_weights, bisections=_QUICK_BISECTIONS)


def _relaxed(
    curves: Sequence[RankCurve], budget: Budget, log_weights: np.ndarray, bisections: int = _BISECTIONS
) -> np.ndarray:
    """Return argmin_j exp(w_l) loss_lj + lambda cost_lj with the least lambda that keeps the budget."""
    width = max(map(len, curves))
    costs = np.full((len(curves), width), np.inf)
    losses = np.full((len(curves), width), np.inf)
    for row, curve in enumerate(curves):
        costs[row, : len(curve)] = curve.cost(budget.measure)
        losses[row, : len(curve)] = curve.losses
    # A common factor changes nothing; without it exp and lambda would leave the range of floats.
    largest = max(float(losses[np.isfinite(losses)].max()), 1e-300)
    relative = log_weights - log_weights.max(1, keepdims=True)
    weighted = np.exp(relative)[:, :, None] * (losses / largest)
    # Padding is never chosen: its loss is infinite at every lambda.
    shares = np.where(np.isfinite(costs), costs / budget.total, 0.0)
    cheapest = costs.argmin(1)
    rows = np.arange(len(curves))

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
