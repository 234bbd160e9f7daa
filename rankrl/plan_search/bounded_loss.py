"""A bounded loss instead of a budget: the cheapest plan whose network loses at most so much of the score.

Nobody knows what fraction of the time to ask for; everybody knows what he can afford to lose. The fraction is
found by bisection over budgets on fits that are kept: each budget's plan is carried out, scored and timed,
and what is measured corrects the losses that the next plan is made by (`corrected_losses`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from decomposition.choose.allocation import least_fraction
from rankrl.plan_search.measured_plans import MeasuredPlan, spent, undominated
from rankrl.plan_search.plan_meter import PlanMeter
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.standard_plans import ALL_INT8, standard_plans, without_most_sensitive

log = logging.getLogger(__name__)

REFITS = 10
"""Plans that are carried out by bisection, at most."""
_SPARED_REFITS = 6
"""Of these, those that find how many sensitive layers stay in floating point."""
_CLOSE = 0.03
"""Bisection ends where the fractions that keep the loss and exceed it differ by this share."""


def within_loss(
    measure: PlanMeter,
    drop: float,
    *,
    around: Callable[[SearchProblem], list[Choices]] | None = None,
) -> MeasuredPlan:
    """Return the cheapest measured plan whose network loses at most `drop`; the dense one where none does."""
    for name, key in standard_plans(measure.problem).items():
        measure(name, key)
    left = REFITS - _spared(measure, drop)
    low, high = _bisected(measure, drop, left)
    problem = measure.problem  # the budget can be met by the costs known here; the next plans may raise them
    if high < 1:
        for name, key in standard_plans(within(problem, high)).items():
            measure(f"{name} at {high:.3f}", key)
    if around is not None and low < high:
        for key in around(within(problem, (low + high) / 2)):
            measure("search", key)
    return undominated(_cheapest(measure, drop), measure.plans.values())


def within(problem: SearchProblem, fraction: float) -> SearchProblem:
    """Return the problem within another fraction of its budget's measure."""
    assert problem.budget is not None
    return replace(problem, budget=replace(problem.budget, fraction=fraction))


def _cheapest(measure: PlanMeter, drop: float) -> MeasuredPlan:
    keeping = [plan for plan in measure.plans.values() if plan.loss <= drop]
    return min(keeping, key=lambda plan: (plan.cost, plan.loss))  # the dense one keeps it


def _spared(measure: PlanMeter, drop: float) -> int:
    """Find how many layers have to stay in floating point, the most sensitive first; return the refits.

    One or two are most often enough, so that numbers are doubled until the loss is kept, and bisected then.
    """
    sites = measure.problem.sites
    in_integers = without_most_sensitive(sites, 0)
    first = measure.plans.get(in_integers)
    if first is None or first.loss <= drop:
        return 0
    count = sum(j != site.dense for site, j in zip(sites, in_integers, strict=True))
    too_few, enough = 0, count
    refits = 0
    while enough - too_few > 1 and refits < _SPARED_REFITS:
        doubled = max(1, 2 * too_few)
        spared = doubled if enough == count and doubled < count else (too_few + enough) // 2
        key = without_most_sensitive(sites, spared)
        refits += key not in measure.plans
        plan = measure(f"{ALL_INT8} but {spared}", key)
        too_few, enough = (too_few, spared) if plan.loss <= drop else (spared, enough)
    return refits


def _bisected(measure: PlanMeter, drop: float, refits: int) -> tuple[float, float]:
    """Look for the least fraction of the budget whose plan keeps the loss.

    Costs are corrected by all plans that are measured so far; plans are made anew with each correction.
    """
    low, high = 0.0, min(1.0, spent(measure.problem, _cheapest(measure, drop).key))
    while True:
        problem = measure.problem
        assert problem.budget is not None
        low = max(low, least_fraction(problem.sites, problem.budget))  # which measured times may have raised
        if refits <= 0 or high - low <= _CLOSE * high:
            return low, max(low, high)
        fraction = (low + high) / 2
        key = tuple(map(int, within(problem, fraction).preset))
        refits -= key not in measure.plans
        plan = measure(f"greedy at {fraction:.3f}", key)
        if plan.loss <= drop:  # what it takes by costs that its own measurement corrected
            high = min(high, max(fraction, spent(measure.problem, key)))
        else:
            low = fraction
