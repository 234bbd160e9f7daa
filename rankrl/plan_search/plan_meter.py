"""Carrying plans out and measuring them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from decomposition import CompressionPlan
from decomposition.cache import Cache, digest
from rankrl.plan_search.measured_plans import MeasuredPlan, spent
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.latency import RelativeTime

log = logging.getLogger(__name__)


class PlanMeter:
    """Carries plans out, once each, and measures them."""

    def __init__(
        self,
        problem: SearchProblem,
        loss: Callable[[CompressionPlan], float],
        time: Callable[[CompressionPlan], RelativeTime] | None,
        *,
        identity: str,
        folder: Path | None = None,
        recosted: Callable[[Sequence[MeasuredPlan]], SearchProblem] | None = None,
    ) -> None:
        self.problem, self._loss, self._time = problem, loss, time
        self._identity, self._cache = digest(identity, problem.fingerprint), Cache(folder)
        self._recosted = recosted
        self.plans: dict[Choices, MeasuredPlan] = {}

    def __call__(self, name: str, key: Sequence[int], chosen_by: str = "") -> MeasuredPlan:
        """Return what is measured of a plan."""
        choices: Choices = tuple(map(int, key))
        if choices not in self.plans:
            plan = self.problem.plan(choices, chosen_by or name)
            operations = [[each.to_dict() for each in layer.operations] for layer in plan]
            known = digest(self._identity, operations)
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
            if self._recosted is not None:
                self.problem = self._recosted(list(self.plans.values()))
        return self.plans[choices]

    def _measured(self, plan: CompressionPlan, choices: Choices) -> tuple[float, float, float | None]:
        if all(j == site.dense for site, j in zip(self.problem.sites, choices, strict=True)):
            return 0.0, 1.0, None
        if self._time is None:
            return self._loss(plan), spent(self.problem, choices), None
        time = self._time(plan)
        return self._loss(plan), time.share, time.width
