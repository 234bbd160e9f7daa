"""Choose the final plan of a search: refit finalists, measure rival plans, bisect for a bounded loss."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from decomposition import CompressionPlan, list_heuristics
from decomposition.choose.allocation import least_fraction
from decomposition.choose.candidates import leaves_one_dense
from decomposition.errors import DecompositionError
from decomposition.progress import Deadline, progress_bar
from rankrl.plan_search.measured_plans import (
    ALL_INT8,
    MeasuredPlan,
    PlanMeter,
    spent,
    standard_plans,
    undominated,
    without_most_sensitive,
)
from rankrl.plan_search.run import ChosenPlan, SearchResult
from rankrl.plan_search.scores.evaluation import (
    CANDIDATES_FILE,
    EpisodeRow,
    Evaluation,
    best_rows,
    known_evaluations,
    make_row,
    write_candidates,
)
from rankrl.plan_search.scores.rewards import Reward
from rankrl.plan_search.selectors.selector import OnUpdate
from rankrl.plan_search.space.problem import Choices, SearchProblem

if TYPE_CHECKING:
    from rankrl.plan_search.session import SearchSession


log = logging.getLogger(__name__)


MEASURE_PLANS, REFIT_FINALISTS = "measure plans", "refit finalists"
"""Stages of progress in which plans are applied and measured."""


def finalists(result: SearchResult, count: int) -> list[EpisodeRow]:
    """Return the `count` plans with the best rewards, and the preset (greedy's plan).

    With the preset among them, a search never ends with a worse plan than greedy's. A selector's first plan
    within the budget replaces a missing preset.
    """
    rows = best_rows(result.rows, count)
    allowed = [row for row in result.rows if row.within_budget]
    preset = next((row for row in allowed if row.phase == "preset"), allowed[0])
    return rows if preset in rows else [*rows, preset]


def best_finalist(
    problem: SearchProblem,
    rows: Sequence[EpisodeRow],
    score: Callable[[CompressionPlan], float],
    reward: Reward,
    chosen_by: str,
) -> EpisodeRow:
    """Return the row whose applied and refitted plan has the best reward; the first of equals."""
    if len(rows) == 1:
        return rows[0]
    known = known_evaluations(problem, rows)
    values = []
    with progress_bar(REFIT_FINALISTS, len(rows)) as bar:
        for row in rows:
            refitted = replace(known[row.key], score=score(problem.plan(row.key, chosen_by)))
            values.append(reward(refitted))
            log.info(
                "finalist of episode %d: reward %.4f, refitted %.4f", row.episode, row.reward, values[-1]
            )
            bar.advance()
    return rows[values.index(max(values))]


REFITS = 6
"""Plans that are refitted by bisection, at most."""
_SPARED_PLANS = 4
"""Plans that find how many sensitive layers stay in floating point, at most."""
_CLOSE = 0.03
"""Bisection ends where the fractions that keep the loss and exceed it differ by this share."""


def within_loss(
    measure: PlanMeter,
    drop: float,
    selector: str = "",
    *,
    around: Callable[[SearchProblem], list[Choices]] | None = None,
) -> MeasuredPlan:
    """Return the cheapest measured plan whose network loses at most `drop`; the dense one if none does.

    Plans are the selector's, but for those that need no search. Those that cannot be the cheapest are not
    refitted: whole files that take longer than one that keeps the loss, and plans expected to lose far more.
    """
    standard = standard_plans(measure.problem)
    spared = len(standard) + _SPARED_PLANS
    with progress_bar(MEASURE_PLANS, spared + REFITS + len(standard)) as measure.bar:  # at most
        measure.each(standard)
        if _cheapest(measure, drop) is None:  # a limit of memory may bar the dense plan
            measure("greedy", tuple(map(int, measure.problem.preset)), selector)
        _spare(measure, drop)
        measure.bar.update(spared)
        low, high = _bisected(measure, drop, selector)
        measure.bar.update(spared + REFITS)
        problem = measure.problem  # later measurements may raise costs beyond its budget
        if high < 1:
            for name, key in standard_plans(within(problem, high)).items():
                if not measure.deadline.over():
                    _tried(measure, drop, f"{name} at {high:.3f}", key)
    if around is not None and low < high and not measure.deadline.over():
        keys = around(within(problem, (low + high) / 2))
        with progress_bar(REFIT_FINALISTS, len(keys)) as measure.bar:
            for key in keys:
                _tried(measure, drop, "search", key, selector)
    best = _cheapest(measure, drop)
    if best is None:
        raise DecompositionError(
            f"no plan found within budget.memory loses at most budget.drop={drop}; allow more of either"
        )
    sites = measure.problem.sites
    allowed = [plan for plan in measure.plans.values() if not leaves_one_dense(sites, plan.key)]
    return undominated(best, allowed)


def within(problem: SearchProblem, fraction: float) -> SearchProblem:
    """Return the problem with another fraction of its budget's measure."""
    assert problem.budget is not None
    return replace(problem, budget=replace(problem.budget, fraction=fraction))


def _cheapest(measure: PlanMeter, drop: float) -> MeasuredPlan | None:
    plans, sites = measure.plans.values(), measure.problem.sites
    keeping = [plan for plan in plans if plan.loss <= drop and not leaves_one_dense(sites, plan.key)]
    return min(keeping, key=lambda plan: (plan.cost, plan.loss), default=None)


def _tried(measure: PlanMeter, drop: float, name: str, key: Sequence[int], selector: str = "") -> bool:
    """Measure a plan if it may be the cheapest that keeps the loss; tell whether to go on to cheaper ones."""
    best = _cheapest(measure, drop)
    exceeded = measure.exceeded(name, key, loss=drop, cost=math.inf if best is None else best.cost)
    if exceeded is None:
        return measure(name, key, selector).loss <= drop
    return exceeded == "cost"


def _spare(measure: PlanMeter, drop: float) -> None:
    """Find how many layers must stay in floating point, the most sensitive first.

    One or two are usually enough, so the number is doubled until the loss is kept, then bisected.
    """
    sites = measure.problem.sites
    in_integers = without_most_sensitive(sites, 0)
    first = measure.plans.get(in_integers)
    if first is None or first.loss <= drop:
        return
    count = sum(j != site.dense for site, j in zip(sites, in_integers, strict=True))
    too_few, enough = 0, count
    left = _SPARED_PLANS
    while enough - too_few > 1 and left > 0 and not measure.deadline.over():
        doubled = max(1, 2 * too_few)
        spared = doubled if enough == count and doubled < count else (too_few + enough) // 2
        key = without_most_sensitive(sites, spared)
        left -= key not in measure.plans
        keeps = _tried(measure, drop, f"{ALL_INT8} but {spared}", key)
        too_few, enough = (too_few, spared) if keeps else (spared, enough)


def _bisected(measure: PlanMeter, drop: float, selector: str) -> tuple[float, float]:
    """Bisect for the least fraction of the budget whose plan keeps the loss; return the final bracket.

    Costs are corrected by all plans timed so far; each correction allocates anew.
    """
    best, refits = _cheapest(measure, drop), REFITS
    low, high = 0.0, 1.0 if best is None else min(1.0, spent(measure.problem, best.key))
    while True:
        problem = measure.problem
        assert problem.budget is not None
        low = max(low, least_fraction(problem.sites, problem.budget))  # measured times may have raised it
        if refits <= 0 or high - low <= _CLOSE * high or measure.deadline.over():
            return low, max(low, high)
        fraction = (low + high) / 2
        key, before = tuple(map(int, within(problem, fraction).preset)), len(measure.plans)
        keeps = _tried(measure, drop, f"greedy at {fraction:.3f}", key, selector)
        refits -= len(measure.plans) - before
        if not keeps:
            low = fraction
        elif key in measure.plans:  # its own measurement may have raised its cost above the fraction
            high = min(high, max(fraction, spent(measure.problem, key)))
        else:
            high = fraction


@dataclass(frozen=True)
class SearchCall:
    """How a session searches: selector and seed, the folder of the record, and what is told of it."""

    selector: str
    selector_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    folder: Path | None = None
    anew_for_other_scores: bool = False
    on_set_aside: Callable[[], None] | None = None
    on_episode: Callable[[EpisodeRow], None] | None = None
    on_update: OnUpdate | None = None
    deadline: Deadline = field(default_factory=Deadline)


_Chosen = TypeVar("_Chosen", bound=ChosenPlan)


def best_of_standard_plans(session: SearchSession, result: _Chosen, call: SearchCall) -> _Chosen:
    """Return the best of a chosen plan and the `standard_plans`, all applied and measured.

    Only budgets in time and in bytes have such rivals: the plans that keep the budget, in time with a margin.
    A plan that dominates another in score and cost replaces it.
    """
    problem = session.problem
    if problem.measure not in ("latency", "bytes") or session.reward.name != "accuracy":
        return result
    rivals = {name: key for name, key in standard_plans(problem).items() if key != result.key}
    if not rivals or call.deadline.over():
        return result
    original = session.scoring.of_original()
    measure = _meter(session, lambda plan: original - session.network_score(plan), call)
    first = measure("the plan of the search", result.key, result.plan.chosen_by)
    limit = 1.0 if session.latency is None else session.latency.fraction_of_original
    limits = {"loss": first.loss, "cost": max(limit, first.cost)}
    worth = {name: key for name, key in rivals.items() if measure.exceeded(name, key, **limits) is None}
    with progress_bar(MEASURE_PLANS, len(worth)) as measure.bar:
        measured = [first, *measure.each(worth)]
    keeping = [plan for plan in measured if plan.keeps(limit) or plan.cost <= min(limit, first.cost)]
    keeping = keeping or [plan for plan in measured if plan.cost <= first.cost]
    best = undominated(min(keeping, key=lambda plan: (plan.loss, plan.cost)), keeping)
    plans = tuple(measure.plans.values())
    if best is first:
        return replace(result, measured=plans)
    log.info("%s is better than the plan of the search, and is taken", best.name)
    missed = None if best.cost <= limit else result.missed
    plan = problem.plan(best.key, best.chosen_by)
    taken = replace(result, plan=plan, key=best.key, measured=plans, missed=missed)
    if not isinstance(taken, SearchResult):
        return taken
    return replace(taken, row=make_row(taken.rows, best.key, best.name, _known(problem, best), -best.loss))


def within_bounded_loss(session: SearchSession, call: SearchCall, drop: float) -> SearchResult:
    """Return the cheapest plan whose network loses at most `drop` (`within_loss`)."""
    start, problem = time.perf_counter(), session.problem
    loss = session.scoring.losses()
    measure = _meter(session, lambda plan: loss(session.applied(plan)), call)
    searches: list[SearchResult] = []

    def around(near: SearchProblem) -> list[Choices]:
        searches.append(session.searched(near, call))
        return [row.key for row in best_rows(searches[-1].rows, session.goal.search.scores().finalists)]

    ruled = call.selector in list_heuristics()  # its plan depends on the budget alone
    best = within_loss(measure, drop, call.selector, around=None if ruled else around)
    if searches and searches[-1].stopped_by == "interrupt":
        return searches[-1]
    rows = searches[-1].rows if searches else ()
    row = make_row(rows, best.key, best.name, _known(problem, best), -best.loss)
    if call.folder is not None:
        write_candidates(problem, call.folder / CANDIDATES_FILE)
    return SearchResult(
        plan=problem.plan(best.key, best.chosen_by),
        key=best.key,
        measured=tuple(measure.plans.values()),
        row=row,
        best=row,
        rows=rows,
        seconds=time.perf_counter() - start,
        stopped_by=searches[-1].stopped_by if searches else "selector",
        objective=searches[-1].objective if searches else {},
    )


def _meter(session: SearchSession, loss: Callable[[CompressionPlan], float], call: SearchCall) -> PlanMeter:
    latency, problem = session.latency, session.problem
    options: dict[str, Any] = {
        "identity": session.evaluator.fingerprint,
        "folder": call.folder,
        "deadline": call.deadline,
    }
    if latency is None or latency.elsewhere:
        return PlanMeter(problem, loss, None, ratio=1.0 if latency is None else latency.ratio, **options)
    if session.goal.budget.drop is not None:
        options["recosted"] = partial(latency.recosted, problem)
    return PlanMeter(problem, loss, latency.share_of_original, ratio=latency.ratio, **options)


def _known(problem: SearchProblem, plan: MeasuredPlan) -> Evaluation:
    """Convert a measured plan into an evaluation; its score is 1 - loss."""
    cost = problem.cost(plan.key)
    kept = (cost.params / problem.params, cost.macs / problem.macs)
    return Evaluation(1 - plan.loss, 1 - plan.loss, cost.params, cost.macs, *kept, seconds=0.0)
