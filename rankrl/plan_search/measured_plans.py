"""Plans that were carried out: what the networks that they become lose, and what they really take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decomposition import CompressionPlan
from decomposition.cache import Cache, digest
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.latency import RelativeTime

log = logging.getLogger(__name__)

SMALLEST_GAIN = 0.01
"""Share of its cost by which a plan has to be cheaper to count as cheaper: two timings of one file differ."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan whose network was made, refit and all.

    Attributes:
        name: What it is called: what proposed it.
        key: The candidate of every site, by index.
        loss: What its network loses of the original's score, in the score's unit; negative for a gain.
        cost: What it takes of the original's cost, measured: its file's time, or what is counted.
        measure: What that is: `latency`, `bytes`, `macs` or `params`; `estimated_latency` for the estimated
            time on another device.
        expected_loss: What the sum of its layers' losses says, without a unit.
        expected_cost: What the sum of its layers' costs says, as a fraction of the original's.
        width: Of the 95 % interval of a measured time; None where the cost is exact.
    """

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


class PlanMeter:
    """Carries plans out, once each, and measures them.

    Args:
        problem: What is searched over.
        loss: From a plan to what its network, refit and all, loses of the original's score.
        time: From a plan to its file's time / the original's; None where costs are counted or estimated.
        identity: What losses depend on beside the plan.
        folder: Where measurements are kept, so that a search that is resumed goes on with the same; or None.
    """

    def __init__(
        self,
        problem: SearchProblem,
        loss: Callable[[CompressionPlan], float],
        time: Callable[[CompressionPlan], RelativeTime] | None,
        *,
        identity: str,
        folder: Path | None = None,
    ) -> None:
        self.problem, self._loss, self._time = problem, loss, time
        self._identity, self._cache = identity, Cache(folder)
        self.plans: dict[Choices, MeasuredPlan] = {}

    def __call__(self, name: str, key: Sequence[int], chosen_by: str = "") -> MeasuredPlan:
        """Return what is measured of a plan.

        Args:
            name: What proposed it.
            key: The candidate of every site, by index.
            chosen_by: Recorded in the plan.
        """
        choices: Choices = tuple(map(int, key))
        if choices not in self.plans:
            plan = self.problem.plan(choices, chosen_by or name)
            operations = [[each.to_dict() for each in layer.operations] for layer in plan]
            known = digest(self._identity, self.problem.fingerprint, operations)
            kept = self._cache.value("measured-plan", known, lambda: self._measured(plan, choices))
            loss, cost, width = kept
            problem = self.problem
            expected = sum(
                float(site.losses[choice]) for site, choice in zip(problem.sites, choices, strict=True)
            )
            estimated = problem.measure == "latency" and self._time is None
            measure = "estimated_latency" if estimated else problem.measure
            measured = MeasuredPlan(
                name, choices, loss, cost, measure, expected, spent(problem, choices), width
            )
            log.info("%s: %.4f lost at %.3f of the %s", name, loss, cost, measure.replace("_", " "))
            self.plans[choices] = measured
        return self.plans[choices]

    def _measured(self, plan: CompressionPlan, choices: Choices) -> tuple[float, float, float | None]:
        if all(j == site.dense for site, j in zip(self.problem.sites, choices, strict=True)):
            return 0.0, 1.0, None
        if self._time is None:
            return self._loss(plan), spent(self.problem, choices), None
        time = self._time(plan)
        return self._loss(plan), time.share, time.width


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
    """Return measured plans as plain values for metrics.json, the cheapest first.

    Args:
        plans: The plans.
        taken: The choices of the one that is returned.
    """
    ordered = sorted(plans, key=lambda plan: (plan.cost, plan.loss))
    return [
        {name: value for name, value in asdict(plan).items() if name != "key"} | {"taken": plan.key == taken}
        for plan in ordered
    ]
