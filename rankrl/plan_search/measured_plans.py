"""Plans that were carried out: what the networks that they become lose, and what they really take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.latency import RelativeTime

SMALLEST_GAIN = 0.01
"""Share of its cost by which a plan has to be cheaper to count as cheaper: two timings of one file differ."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan whose network was made, refit and all."""

    name: str
    key: Choices
    loss: float
    cost: float
    measure: str
    expected_loss: float
    expected_cost: float
    width: float | None = None

    def keeps(self, fraction: float) -> bool:
        """Tell whether the plan costs at most so much of the original, a measured time with a margin."""
        if self.width is None:
            return self.cost <= fraction
        return RelativeTime(self.cost, self.width).keeps(fraction)

    def dominates(self, other: MeasuredPlan) -> bool:
        """Tell whether the plan is at least as good in both, and better in one of them."""
        cheaper = self.cost < other.cost * (1 - SMALLEST_GAIN)
        no_dearer = self.cost <= other.cost
        return (cheaper and self.loss <= other.loss) or (no_dearer and self.loss < other.loss)


def spent(problem: SearchProblem, choices: Sequence[int]) -> float:
    """Return what choices cost of the first budget's measure by the sum of the layers, as a fraction."""
    budget = problem.budget
    assert budget is not None
    return budget.spent(problem.sites, choices) / budget.total


def undominated(plan: MeasuredPlan, others: Iterable[MeasuredPlan]) -> MeasuredPlan:
    """Return a plan, or the best of those that dominate it: what is returned is never dominated."""
    better = [other for other in others if other.dominates(plan)]
    if not better:
        return plan
    return undominated(min(better, key=lambda each: (each.loss, each.cost)), others=list(others))


def as_rows(plans: Iterable[MeasuredPlan], taken: Choices) -> list[dict[str, Any]]:
    """Return measured plans as plain values for metrics.json, the cheapest first."""
    ordered = sorted(plans, key=lambda plan: (plan.cost, plan.loss))
    return [
        {name: value for name, value in asdict(plan).items() if name != "key"} | {"taken": plan.key == taken}
        for plan in ordered
    ]
