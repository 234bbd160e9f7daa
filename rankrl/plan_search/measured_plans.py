"""Apply plans and measure their loss and cost; list uniform and all-int8 plans as rivals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from decomposition import CandidateSet, CompressionPlan, get_format, list_formats
from decomposition.cache import Cache, digest
from decomposition.choose.allocation import expected_loss
from decomposition.choose.candidates import Candidate
from decomposition.network.geometry import plain_modes
from decomposition.progress import Deadline, ProgressBar
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.latency import RelativeTime

log = logging.getLogger(__name__)

SMALLEST_GAIN = 0.01
"""Share of its cost by which a plan has to be cheaper to count as cheaper: two timings of one file differ."""


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Cost:
    """The share of the original's cost that counts, the expected one, and the measured one with its width."""

    share: float
    expected: float
    measured: RelativeTime | None = None

    @property
    def unsure(self) -> float | None:
        """The measured share where the expected one counts instead."""
        return None if self.measured is None or self.measured.share == self.share else self.measured.share


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was applied and refitted, with its measured loss and cost.

    `cost` is the expected one where the interval of the measured one, then `unsure_cost`, is too wide.
    """

    name: str
    key: Choices
    loss: float
    cost: float
    measure: str
    expected_loss: float
    expected_cost: float
    width: float | None = None
    chosen_by: str = ""
    unsure_cost: float | None = None

    def keeps(self, fraction: float) -> bool:
        """Whether the plan costs at most this fraction of the original; a measured time, with a margin."""
        if self.width is None:
            return self.cost <= fraction
        return RelativeTime(self.cost, self.width if self.unsure_cost is None else 0.0).keeps(fraction)

    def dominates(self, other: MeasuredPlan) -> bool:
        """Whether the plan is at least as good in loss and cost, and better in one of them."""
        cheaper = self.cost < other.cost * (1 - SMALLEST_GAIN)
        no_dearer = self.cost <= other.cost
        return (cheaper and self.loss <= other.loss) or (no_dearer and self.loss < other.loss)


def spent(problem: SearchProblem, choices: Sequence[int] | np.ndarray) -> float:
    """Return the layers' summed cost in the first budget's measure, as a fraction of its total."""
    budget = problem.budget
    assert budget is not None
    return budget.spent(problem.sites, choices) / budget.total


def undominated(plan: MeasuredPlan, others: Iterable[MeasuredPlan]) -> MeasuredPlan:
    """Return the plan, or the best of those that dominate it; the result is never dominated."""
    better = [other for other in others if other.dominates(plan)]
    if not better:
        return plan
    return undominated(min(better, key=lambda each: (each.loss, each.cost)), others=list(others))


def as_rows(plans: Iterable[MeasuredPlan], taken: Choices) -> list[dict[str, Any]]:
    """Return measured plans as plain values for metrics.json, the cheapest first."""
    ordered = sorted(plans, key=lambda plan: (plan.cost, plan.loss))
    return [
        {name: value for name, value in asdict(plan).items() if name not in ("chosen_by", "key")}
        | {"taken": plan.key == taken}
        for plan in ordered
    ]


_FAR = 5
"""Times a loss beyond which an expected one is far from it. Sums of layers' errors were 0.1 to 30 times the
measured losses in 39 plans of three files; the least factor measured so far scales them."""
_LEAST_LOSS = 0.001
"""Smaller losses are a matter of single inputs, and say little of others."""


class PlanMeter:
    """Times plans, applies and refits those that are worth it, once each, and measures their loss."""

    def __init__(
        self,
        problem: SearchProblem,
        loss: Callable[[CompressionPlan], float],
        time: Callable[[CompressionPlan], RelativeTime] | None,
        *,
        identity: str,
        ratio: float = 1.0,
        folder: Path | None = None,
        recosted: Callable[[Mapping[Choices, float]], SearchProblem] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.problem, self._loss, self._time = problem, loss, time
        self._ratio = ratio  # of the dense network's cost to that of the original
        self._identity, self._cache = digest(identity, problem.fingerprint), Cache(folder)
        self._recosted = recosted
        self.deadline = Deadline() if deadline is None else deadline
        self.bar: ProgressBar | None = None  # of the plans to measure
        self.plans: dict[Choices, MeasuredPlan] = {}
        self._costs: dict[Choices, _Cost] = {}

    def each(self, plans: Mapping[str, Choices]) -> list[MeasuredPlan]:
        """Measure plans by name, in order, as far as the deadline allows."""
        return [self(name, key) for name, key in plans.items() if not self.deadline.over()]

    def __call__(self, name: str, key: Sequence[int], chosen_by: str = "") -> MeasuredPlan:
        """Measure a plan, or return its earlier measurement."""
        choices: Choices = tuple(map(int, key))
        if choices not in self.plans:
            cost, expected = self._cost(choices), self._expected_loss(choices)
            plan = self.problem.plan(choices, chosen_by or name)
            loss = 0.0 if self._is_dense(choices) else self._kept("loss", plan, lambda: self._loss(plan))
            estimated = self.problem.measure == "latency" and self._time is None
            measure = "estimated_latency" if estimated else self.problem.measure
            self.plans[choices] = MeasuredPlan(
                name,
                choices,
                loss,
                cost.share,
                measure,
                expected,
                cost.expected,
                None if cost.measured is None else cost.measured.width,
                plan.chosen_by,
                cost.unsure,
            )
            log.info("%s: %.4f lost at %.3f of the %s", name, loss, cost.share, measure.replace("_", " "))
            if self.bar is not None:
                self.bar.advance()
        return self.plans[choices]

    def exceeded(
        self, name: str, key: Sequence[int], *, loss: float, cost: float
    ) -> Literal["loss", "cost"] | None:
        """Return which limit a plan exceeds by what is known before it is refitted; `None` for neither.

        Its whole file is timed, which needs no refit; the loss expected of it has to be far above the limit.
        """
        choices: Choices = tuple(map(int, key))
        if choices in self.plans:
            return None
        if self._least_loss(choices) > _FAR * max(loss, _LEAST_LOSS):
            log.info("%s: not refitted, far more than %.4f would be lost", name, loss)
            return "loss"
        if (share := self._cost(choices).share) > cost:
            log.info("%s: not refitted, %.3f of the cost is more than %.3f", name, share, cost)
            return "cost"
        return None

    def _least_loss(self, choices: Choices) -> float:
        """Return the loss expected of a plan, times the least measured share of an expected loss."""
        known = [plan.loss / plan.expected_loss for plan in self.plans.values() if plan.expected_loss > 0]
        return self._expected_loss(choices) * min(known, default=0.0)

    def _expected_loss(self, choices: Choices) -> float:
        return expected_loss(self.problem.sites, choices)

    def _cost(self, choices: Choices) -> _Cost:
        """Measure the cost of a plan; a time corrects those that other plans are expected to take."""
        if choices not in self._costs:
            expected = self._ratio * spent(self.problem, choices)
            if self._is_dense(choices):
                self._costs[choices] = _Cost(1.0, expected)
            elif self._time is None:
                self._costs[choices] = _Cost(expected, expected)
            else:
                time = self._timed(choices, self._time)
                self._costs[choices] = _Cost(time.or_expected(expected).share, expected, time)
            if self._recosted is not None:
                sure = {key: cost.share for key, cost in self._costs.items() if cost.unsure is None}
                self.problem = self._recosted(sure)
        return self._costs[choices]

    def _timed(self, choices: Choices, timer: Callable[[CompressionPlan], RelativeTime]) -> RelativeTime:
        plan = self.problem.plan(choices, "a trial")

        def timed() -> tuple[float, float]:
            time = timer(plan)
            return time.share, time.width

        return RelativeTime(*self._kept("time", plan, timed))

    def _kept(self, what: str, plan: CompressionPlan, measure: Callable[[], _Value]) -> _Value:
        operations = [[each.to_dict() for each in layer.operations] for layer in plan]
        return self._cache.value("measured-plan", digest(self._identity, operations, what), measure)

    def _is_dense(self, choices: Choices) -> bool:
        return all(j == site.dense for site, j in zip(self.problem.sites, choices, strict=True))


ALL_DENSE, ALL_INT8, CONVOLUTIONS = "all dense", "all int8", "int8 convolutions"


def standard_plans(problem: SearchProblem) -> dict[str, Choices]:
    """Return the distinct plans that keep the budget and need no search, by name: dense, int8, uniform."""
    sites = problem.sites
    dense = tuple(site.dense for site in sites)
    plans = {ALL_DENSE: dense}
    if any(candidate.only_integers for site in sites for candidate in site.candidates):
        plans[ALL_INT8] = _chosen(sites, lambda candidate: candidate.only_integers)
        plans[CONVOLUTIONS] = tuple(
            choice if site.spec.kind.startswith("conv") else site.dense
            for site, choice in zip(sites, plans[ALL_INT8], strict=True)
        )
    if problem.budget is not None and problem.budget.fraction < 1:
        plans |= _uniform_plans(problem)
    different: dict[Choices, str] = {}
    for name, plan in plans.items():
        if problem.keeps_budget(plan):
            different.setdefault(plan, name)
    return {name: plan for plan, name in different.items()}


def without_most_sensitive(sites: Sequence[CandidateSet], count: int) -> Choices:
    """Return the plan with all layers in integers except the `count` that lose most by it."""
    plan = _chosen(sites, lambda candidate: candidate.only_integers)
    losses = [site.losses[choice] for site, choice in zip(sites, plan, strict=True)]
    spared = set(np.argsort(losses)[::-1][:count].tolist())
    return tuple(site.dense if index in spared else plan[index] for index, site in enumerate(sites))


def _uniform_plans(problem: SearchProblem) -> dict[str, Choices]:
    """Return the best uniform plan over all formats, in floating point and in integers."""
    best: dict[bool, tuple[float, str, Choices]] = {}
    for (name, integer), members in families(problem.sites).items():
        plan = uniform(problem, members)
        if plan is not None:
            titled = (expected_loss(problem.sites, plan), _title(name, integer), plan)
            best[integer] = min(best.get(integer, titled), titled)
    return {title: plan for _, title, plan in best.values()}


def uniform(problem: SearchProblem, members: Sequence[np.ndarray]) -> Choices | None:
    """Return one family's plan with the largest equal share of every layer within the budget, if any."""
    shares = _shares(problem.sites, members, problem.measure)
    for level in sorted({float(share) for each in shares for share in each if share < 1}, reverse=True):
        plan = _at_share(members, shares, level)
        if problem.keeps_budget(plan):
            return plan
    return None


def uniform_plans(sites: Sequence[CandidateSet], measure: str, share: float) -> dict[str, Choices]:
    """Return each format's and arithmetic's plan at one share of every layer, by name."""
    return {
        _title(name, integer): _at_share(members, _shares(sites, members, measure), share)
        for (name, integer), members in families(sites).items()
    }


def _title(name: str, integer: bool) -> str:
    return f"uniform {name}{' int8' if integer else ''}"


def _shares(sites: Sequence[CandidateSet], members: Sequence[np.ndarray], measure: str) -> list[np.ndarray]:
    """Return the cost of each member of a family, as a share of its dense layer's."""
    costs = [site.cost(measure).astype(float) for site in sites]
    return [cost[each] / cost[site.dense] for cost, each, site in zip(costs, members, sites, strict=True)]


def _at_share(members: Sequence[np.ndarray], shares: Sequence[np.ndarray], level: float) -> Choices:
    return tuple(int(indices[_under(share, level)]) for indices, share in zip(members, shares, strict=True))


def _under(shares: np.ndarray, level: float) -> int:
    """Return the index of the largest share up to a level, or of the smallest where all are above."""
    allowed = np.flatnonzero(shares <= level)
    return int(allowed[np.argmax(shares[allowed])] if len(allowed) else np.argmin(shares))


def families(sites: Sequence[CandidateSet]) -> dict[tuple[str, bool], list[np.ndarray]]:
    """Group the candidates by format and arithmetic; each group has a fallback for every site."""
    kinds = sorted(
        {
            (candidate.generator, candidate.integer)
            for site in sites
            for candidate in site.candidates
            if _factorised(candidate)
        }
    )
    return {kind: [_members(site, kind) for site in sites] for kind in kinds}


def _members(site: CandidateSet, kind: tuple[str, bool]) -> np.ndarray:
    generator, integer = kind
    rest = next((j for j, each in enumerate(site.candidates) if integer and each.only_integers), site.dense)
    factorised = [
        index
        for index, each in enumerate(site.candidates)
        if _factorised(each) and each.integer == integer and _of_format(site, each.generator, generator)
    ]
    return np.array([*factorised, rest])


def _of_format(site: CandidateSet, name: str, wanted: str) -> bool:
    """Whether a site's candidates of format `name` count as `wanted`: 1x1 layers share matrix formats."""
    if name == wanted or site.spec.kernel_elements > 1:
        return name == wanted
    if not {name, wanted} <= set(list_formats()):  # it may also be a precision of dense weights
        return False
    return get_format(name).same_matrices(get_format(wanted), plain_modes(site.spec))


def _factorised(candidate: Candidate) -> bool:
    return (
        len(candidate.operations) > candidate.computes_integers
        and candidate.removed is None
        and bool(candidate.generator)
    )


def _chosen(sites: Sequence[CandidateSet], wanted: Callable[[Candidate], bool]) -> Choices:
    """Return the first candidate of every site that `wanted` accepts, else the dense one."""
    return tuple(
        next((index for index, each in enumerate(site.candidates) if wanted(each)), site.dense)
        for site in sites
    )
