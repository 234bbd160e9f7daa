"""The cheapest plan, and what no plan can reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from decomposition.choose.budget import Budget
from decomposition.choose.cost_table import CostTable, best_mixture
from decomposition.errors import DecompositionError


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
    """Return the smallest fraction that any plan can reach, without regard to a second budget."""
    alone = replace(budget, also=None)
    return budget.spent(sites, cheapest_choices(sites, alone)) / budget.total


def check_reachable(sites: Sequence[CandidateSet], budget: Budget) -> None:
    """Refuse a budget that no plan can reach."""
    for limit in budget.limits:
        least = least_fraction(sites, limit)
        if least > limit.fraction:
            raise DecompositionError(
                f"budget.{limit.measure}={limit.fraction} cannot be reached: with the cheapest ranks "
                f"everywhere {least * limit.total:.10g} of {limit.total:.10g} {limit.measure} remain "
                f"({limit.fixed:.10g} of them in what stays as it is); the least is "
                f"{np.ceil(least * 1e4) / 1e4:.4f}"
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
