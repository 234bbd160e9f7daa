"""The end of a search: plans are carried out, and the best of what was measured is returned."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposition import CompressionPlan, list_heuristics
from rankrl.plan_search.bounded_loss import within_loss
from rankrl.plan_search.measured_plans import MeasuredPlan, undominated
from rankrl.plan_search.plan_meter import PlanMeter
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.scores.history import (
    CANDIDATES_FILE,
    EpisodeRow,
    make_row,
    write_candidates,
)
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.standard_plans import standard_plans

if TYPE_CHECKING:
    from rankrl.plan_search.session import SearchSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchCall:
    """What `SearchSession.search` was asked for."""

    selector: str
    selector_options: Mapping[str, Any]
    seed: int
    folder: Path | None
    anew_for_other_scores: bool
    on_set_aside: Callable[[], None] | None
    on_episode: Callable[[EpisodeRow], None] | None


def best_of_standard_plans(session: SearchSession, result: SearchResult, call: SearchCall) -> SearchResult:
    """Return the best of a search's plan and those that anyone would write, all carried out and measured.

    They are compared within budgets in time and in bytes, where they are the rivals: those that keep the
    budget, in time with a margin. A plan that is at least as good as another in score and cost, and better in
    one of them, is taken in its place.
    """
    problem = session.problem
    if problem.measure not in ("latency", "bytes") or session.reward.name != "accuracy":
        return result
    rivals = {name: key for name, key in standard_plans(problem).items() if key != result.row.key}
    if not rivals:
        return result
    original = session.scoring.of_original()
    measure = _meter(session, lambda plan: original - session.network_score(plan), call)
    first = measure("the plan of the search", result.row.key, result.plan.chosen_by)
    limit = 1.0 if session.latency is None else session.latency.fraction_of_original
    measured = [first, *(measure(name, key) for name, key in rivals.items())]
    keeping = [plan for plan in measured if plan.keeps(limit) or plan.cost <= min(limit, first.cost)]
    keeping = keeping or [plan for plan in measured if plan.cost <= first.cost]
    best = undominated(min(keeping, key=lambda plan: (plan.loss, plan.cost)), keeping)
    plans = tuple(measure.plans.values())
    if best is first:
        return replace(result, measured=plans)
    log.info("%s is better than the plan of the search, and is taken", best.name)
    row = make_row(result.rows, best.key, best.name, _known(problem, best), -best.loss)
    missed = None if best.cost <= limit else result.missed
    plan = problem.plan(best.key, best.name)
    return replace(result, plan=plan, row=row, measured=plans, missed=missed)


def within_bounded_loss(session: SearchSession, call: SearchCall, drop: float) -> SearchResult:
    """Return the cheapest plan whose network loses at most so much (`within_loss`)."""
    start, problem = time.perf_counter(), session.problem
    loss = session.scoring.losses()
    measure = _meter(session, lambda plan: loss(session.applied(plan)), call)
    searches: list[SearchResult] = []

    def around(near: SearchProblem) -> list[Choices]:
        searches.append(session.searched(near, call))
        return [row.key for row in best_rows(searches[-1].rows, session.goal.search.scores().finalists)]

    ruled = call.selector in list_heuristics()  # its plan depends on the budget alone
    best = within_loss(measure, drop, around=None if ruled else around)
    if searches and searches[-1].stopped_by == "interrupt":
        return searches[-1]
    rows = searches[-1].rows if searches else ()
    row = make_row(rows, best.key, best.name, _known(problem, best), -best.loss)
    if call.folder is not None:
        write_candidates(problem, call.folder / CANDIDATES_FILE)
    return SearchResult(
        plan=problem.plan(
            best.key, call.selector if best.name.startswith(("greedy", "search")) else best.name
        ),
        row=row,
        best=row,
        rows=rows,
        seconds=time.perf_counter() - start,
        stopped_by=searches[-1].stopped_by if searches else "selector",
        measured=tuple(measure.plans.values()),
    )


def _meter(session: SearchSession, loss: Callable[[CompressionPlan], float], call: SearchCall) -> PlanMeter:
    latency, problem = session.latency, session.problem
    options: dict[str, Any] = {"identity": session.evaluator.fingerprint, "folder": call.folder}
    if latency is None or latency.elsewhere:
        return PlanMeter(problem, loss, None, **options)
    if session.goal.budget.drop is not None:
        options["recosted"] = partial(latency.recosted, problem)
    return PlanMeter(problem, loss, latency.share_of_original, **options)


def _known(problem: SearchProblem, plan: MeasuredPlan) -> Evaluation:
    """Return what is known of a measured plan as an evaluation; its score is 1 - its loss."""
    cost = problem.cost(plan.key)
    kept = (cost.params / problem.params, cost.macs / problem.macs)
    return Evaluation(1 - plan.loss, 1 - plan.loss, cost.params, cost.macs, *kept, seconds=0.0)
