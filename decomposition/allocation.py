"""Spending one budget over all layers: Lagrangian allocation (Shoham & Gersho 1988)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decomposition.curves import RankCurve
from decomposition.errors import DecompositionError

_BISECTIONS = 60


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
        least = sum(float(curve.cost(self.measure).min()) for curve in curves)
        if least > self.available:
            smallest = (least + self.fixed) / self.total
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} cannot be reached: with the smallest ranks "
                f"everywhere {least + self.fixed:g} of {self.total} {self.measure} remain; the least is "
                f"{np.ceil(smallest * 1e4) / 1e4:.4f}"
            )


def allocate(
    curves: Sequence[RankCurve], budget: Budget, log_weights: np.ndarray | None = None
) -> np.ndarray:
    """Choose a candidate a layer so that the weighted squared errors are least within the budget.

    Minimises sum_l exp(w_l) error_l^2 + lambda cost_l with lambda found by bisection, then spends what the
    convex relaxation left over on the best gain per cost.

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
    weights = np.exp(np.zeros(len(curves)) if log_weights is None else np.asarray(log_weights, dtype=float))
    costs = [curve.cost(budget.measure).astype(float) for curve in curves]
    losses = [weight * curve.errors**2 for weight, curve in zip(weights, curves, strict=True)]

    def choose(multiplier: float) -> np.ndarray:
        # Of equal candidates the cheaper one: the last is the dense layer, so ties go to the first.
        totals = (loss + multiplier * cost for loss, cost in zip(losses, costs, strict=True))
        return np.array([int(np.argmin(total)) for total in totals])

    def spent(choices: np.ndarray) -> float:
        return float(sum(c[j] for c, j in zip(costs, choices, strict=True)))

    cheapest = np.array([int(np.argmin(c)) for c in costs])
    high = 1.0 / budget.total
    while spent(choose(high)) > budget.available and high < 1e30:
        high *= 4
    if spent(choose(high)) > budget.available:
        return _fill(cheapest, losses, costs, budget.available)
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if spent(choose(middle)) > budget.available:
            low = middle
        else:
            high = middle
    return _fill(choose(high), losses, costs, budget.available)


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
