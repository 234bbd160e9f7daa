"""Run a search: propose, score, observe and record plans, resume, and finish on Ctrl-C."""

from __future__ import annotations

import csv
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from decomposition.plan.plan import CompressionPlan
from decomposition.progress import Deadline
from rankrl.errors import CheckpointError, ConfigError, counted
from rankrl.files import write_json
from rankrl.option_types import shown
from rankrl.options.search import budget_line, check_limits
from rankrl.plan_search.measured_plans import MeasuredPlan, as_rows
from rankrl.plan_search.scores.evaluation import (
    CANDIDATES_FILE,
    EPISODES_FILE,
    EpisodeRow,
    EpisodesFile,
    Evaluator,
    best_rows,
    known_evaluations,
    make_row,
    recorded_steps,
    write_candidates,
)
from rankrl.plan_search.scores.rewards import Reward, create_reward
from rankrl.plan_search.selectors.selector import OnUpdate, Proposal, Selector
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.state_file import damaged_state

log = logging.getLogger(__name__)


class FinishOnInterrupt:
    """While the block runs, the first Ctrl-C only sets `requested`; the second interrupts at once.

    Outside the main thread, where signals cannot be handled, Ctrl-C keeps its default effect.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal.Handlers | object = None

    def __enter__(self) -> FinishOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nFinishing this episode, then saving. Press Ctrl-C again to stop at once.", file=sys.stderr)


@dataclass(frozen=True)
class LayerCost:
    name: str
    loss: float
    saved_params: int
    saved_macs: int
    saved_time: float | None = None


def layer_costs(problem: SearchProblem, key: Choices) -> tuple[LayerCost, ...]:
    """Return the loss and savings of every compressed layer of a plan, the largest loss first."""
    budget = problem.budget
    timed = [each for each in (budget, budget and budget.also) if each and each.measure == "latency"]
    layers = []
    for site, choice in zip(problem.sites, key, strict=True):
        if choice == site.dense:
            continue
        before, after = site.candidates[site.dense].cost, site.candidates[choice].cost
        time = None
        if timed and before.time is not None and after.time is not None:
            time = (before.time - after.time) / timed[0].total
        saved = (before.params - after.params, before.macs - after.macs)
        layers.append(LayerCost(site.name, float(site.losses[choice]), *saved, time))
    return tuple(sorted(layers, key=lambda layer: -layer.loss))


SETUP_FILE = "search.json"
"""Name of the file with the settings of a folder's search, written once; `episodes.csv` has its steps."""
_VERSION = 1
_ENDED = "ended after"
"""Key of the seconds that ended a search in its settings."""


StoppedBy = Literal["episodes", "plans", "seconds", "patience", "interrupt", "selector"]


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a network on another device, estimated from the times of layers there."""

    share: float
    conditions: str
    networks: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan that a rule chose from candidates and a budget, and what is known of it.

    Attributes:
        plan: The plan.
        key: The candidate of every site, by index.
        missed: What to tell a reader if a budget in time is missed, else None.
        measured: Plans that were applied and measured before one was taken.
        layers: Loss and savings of every compressed layer.
        ratios: Original ÷ compressed parameters and multiply-accumulates.
        estimate: The time on another device; None where this one is timed.
        stopped_by: The limit that ended the search, or `seconds` where plans were left unmeasured.
    """

    plan: CompressionPlan
    key: Choices
    missed: str | None = None
    measured: tuple[MeasuredPlan, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    estimate: TimeEstimate | None = None
    stopped_by: StoppedBy | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult(ChosenPlan):
    """The plan that a search chose, and its record; `objective` names reward, metric and action."""

    row: EpisodeRow
    best: EpisodeRow
    rows: tuple[EpisodeRow, ...]
    seconds: float
    account: tuple[Mapping[str, Any], ...] = ()
    objective: Mapping[str, str] = field(default_factory=dict)

    @property
    def different(self) -> list[EpisodeRow]:
        """The rows of the different plans, each where it was proposed first."""
        first: dict[str, EpisodeRow] = {}
        for row in self.rows:
            first.setdefault(row.choices, row)
        return list(first.values())

    @property
    def evaluations(self) -> int:
        """Number of different plans that were scored."""
        return sum(not row.cached for row in self.rows)

    @property
    def plans(self) -> int:
        """Number of different plans, also those whose scores were known before the search."""
        return len(self.different)


def search_numbers(result: ChosenPlan) -> dict[str, Any]:
    """Return the sections `search` and `layers` of metrics.json; of a rule, what was measured of its plan."""
    searched: dict[str, Any] = {}
    if isinstance(result, SearchResult):
        searched = {
            **result.objective,
            "episodes": len(result.rows),
            "plans": result.plans,
            "evaluations": result.evaluations,
            "seconds": result.seconds,
            "best_reward": result.best.reward,
            "chosen_reward": result.row.reward,
            "chosen_episode": result.row.episode,
            **({"agent": list(result.account)} if result.account else {}),
        }
    if result.stopped_by is not None:
        searched["stopped_by"] = result.stopped_by
    if result.measured:
        searched["measured"] = as_rows(result.measured, result.key)
    if result.estimate is not None:
        searched["estimate"] = asdict(result.estimate)
    layers = [asdict(layer) for layer in result.layers]
    return {**({"search": searched} if searched else {}), **({"layers": layers} if layers else {})}


def with_row(
    problem: SearchProblem, result: SearchResult, row: EpisodeRow, missed: str | None = None
) -> SearchResult:
    """Return the result with another row's plan; `missed` says why the budget is not kept, if it is not."""
    plan = problem.plan(row.key, result.plan.chosen_by)
    return replace(result, plan=plan, key=row.key, row=row, missed=missed)


def run_search(
    problem: SearchProblem,
    evaluator: Evaluator,
    selector: Selector,
    *,
    episodes: int,
    reward: Reward | None = None,
    deadline: Deadline | None = None,
    patience: int | None = None,
    plans: int | None = None,
    folder: Path | None = None,
    resume: bool = False,
    anew_for_other_scores: bool = False,
    on_set_aside: Callable[[], None] | None = None,
    on_episode: Callable[[EpisodeRow], None] | None = None,
    on_update: OnUpdate | None = None,
) -> SearchResult:
    """Search with a selector for the plan with the best reward.

    With a folder, every step is recorded in its `episodes.csv`; with `resume`, the selector is told what is
    recorded there, and a search killed at any moment continues to the same result, bit for bit. One that the
    deadline ended has ended, unless it is given more seconds; one step is scored in any case.
    """
    check_limits(episodes, None, patience, plans)
    deadline = Deadline() if deadline is None else deadline
    reward = create_reward("accuracy", budgeted=problem.budget is not None) if reward is None else reward
    steps: list[list[EpisodeRow]] = []
    table = None
    if folder is not None:
        setup, path = _setup(problem, evaluator, selector, reward, episodes), folder / SETUP_FILE
        setup["plans"] = plans  # the last step may end there
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"{folder} holds a search already; resume it, or choose another folder for a new one"
                )
            before = _read_setup(path)
            ended = before.pop(_ENDED, None)
            differing = _differing(before, setup)
            if anew_for_other_scores and list(differing) == ["evaluator"]:
                if on_set_aside is not None:
                    on_set_aside()
                _set_aside(folder)
            elif differing:
                raise CheckpointError(_another_search(path, differing))
            else:
                steps = _recorded(folder / EPISODES_FILE)
                seconds = deadline.seconds
                deadline.stopped |= ended is not None and seconds is not None and seconds <= ended
        write_candidates(problem, folder / CANDIDATES_FILE)
        write_json(path, setup)
        table = EpisodesFile(folder / EPISODES_FILE, [row for step in steps for row in step])
    rows = [row for step in steps for row in step]
    if rows:
        evaluator.restore(known_evaluations(problem, rows))
    spent = rows[-1].elapsed if rows else 0.0
    stopped_by = _limit(rows, episodes, deadline, patience, plans)
    if stopped_by is None:
        _replay(selector, steps)
        if folder is not None:
            selector.use_folder(folder)
        selector.on_update = on_update  # what is replayed was tracked before

    start = time.perf_counter() - spent
    with FinishOnInterrupt() as interrupt:
        while stopped_by is None:
            proposals = _affordable(_proposed(problem, selector)[: episodes - len(rows)], rows, plans)
            if not proposals:
                stopped_by = "selector"
                break
            evaluations = evaluator.evaluate([proposal.choices for proposal in proposals])
            rewards = [reward(evaluation) for evaluation in evaluations]
            selector.observe(proposals, rewards)
            first, elapsed = len(rows), time.perf_counter() - start
            scored = zip(proposals, evaluations, rewards, strict=True)
            for number, (proposal, evaluation, value) in enumerate(scored, 1):
                row = make_row(
                    rows,
                    proposal.choices,
                    proposal.phase,
                    evaluation,
                    value,
                    proposal.actions,
                    within_budget=problem.keeps_budget(proposal.choices),
                )
                rows.append(replace(row, elapsed=elapsed, ends_step=number == len(proposals)))
            if table is not None:
                table.append(rows[first:])
            for row in rows[first:]:
                if on_episode is not None:
                    on_episode(row)
            stopped_by = (
                "interrupt" if interrupt.requested else _limit(rows, episodes, deadline, patience, plans)
            )
    if not rows:
        raise ConfigError(f"selector {selector.name!r} proposed no plan; check its options")
    if stopped_by == "seconds" and folder is not None:
        write_json(folder / SETUP_FILE, {**setup, _ENDED: deadline.seconds})
    best = best_rows(rows, 1)[0]
    if stopped_by != "interrupt":
        _check_budget(problem, selector, rows)
    return SearchResult(
        plan=problem.plan(best.key, selector.name),
        key=best.key,
        row=best,
        best=best,
        rows=tuple(rows),
        seconds=time.perf_counter() - start,
        stopped_by=stopped_by,
        account=tuple(selector.account(best, _reward_before(rows, best))),
    )


def _reward_before(rows: Sequence[EpisodeRow], row: EpisodeRow) -> float:
    """Return the last reward that was known when a row's step began, 0 in the first."""
    return next((each.reward for each in reversed(rows[: row.episode - 1]) if each.ends_step), 0.0)


def _check_budget(problem: SearchProblem, selector: Selector, rows: Sequence[EpisodeRow]) -> None:
    """Refuse a search whose plans are all over the budget; warn where some are."""
    over = sum(not row.within_budget for row in rows)
    if not over or problem.budget is None:
        return
    limits = {limit.measure: round(limit.fraction, 4) for limit in problem.budget.limits}
    counts = f"{over} of {counted(len(rows), 'plan')} that selector {selector.name!r} proposed"
    advice = "let it propose plans with problem.keeps_budget(choices)"
    if over == len(rows):
        raise ConfigError(f"{counts} are over the {budget_line(limits)}, so there is none to take; {advice}")
    log.warning("%s are over the %s and do not count; %s", counts, budget_line(limits), advice)


def _setup(
    problem: SearchProblem, evaluator: Evaluator, selector: Selector, reward: Reward, episodes: int
) -> dict[str, Any]:
    """Return everything on which the result of a search depends, as JSON has it."""
    setup = {
        "version": _VERSION,
        "problem": problem.fingerprint,
        "evaluator": evaluator.fingerprint,
        "selector": selector.name,
        "selector options": dict(selector.options),
        "seed": selector.seed,
        "reward": [reward.name, dict(reward.options)],
        "episodes": episodes,  # selectors' schedules depend on it
    }
    return dict(json.loads(json.dumps(setup)))


def _differing(before: Mapping[str, Any], setup: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values of a search's setup, before and now, that differ."""
    pairs = {key: (before.get(key), setup.get(key)) for key in sorted({*before, *setup})}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _read_setup(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise damaged_state(path, "search", error) from error


def _another_search(path: Path, differing: Mapping[str, tuple[Any, Any]]) -> str:
    key, (old, new) = next(iter(differing.items()))
    return (
        f"{path} belongs to another search: {key} was {old!r}, is now {new!r}. Use the same settings to "
        "resume, the number of threads too (OMP_NUM_THREADS: fits may differ), with a budget in time the "
        "machine and the cache too (RANKRL_CACHE: it keeps the times), or name another folder."
    )


def _recorded(path: Path) -> list[list[EpisodeRow]]:
    """Read the steps of a search; none where it was killed before the first."""
    try:
        return recorded_steps(path.read_bytes().decode())
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, ValueError) as error:
        raise damaged_state(path, "search", error) from error


def _replay(selector: Selector, steps: Sequence[Sequence[EpisodeRow]]) -> None:
    """Tell a selector what is recorded; warn if it would not have proposed the last step itself."""
    for number, step in enumerate(steps, 1):
        proposals = [Proposal(row.key, row.phase, tuple(json.loads(row.actions))) for row in step]
        if number == len(steps) and selector.seeded:
            proposed = [each.choices for each in selector.propose()][: len(step)]
            if proposed != [each.choices for each in proposals]:
                log.warning(
                    "selector %r proposes other plans than are recorded up to episode %d: they come from "
                    "another processor or version, or it depends on more than the seed and what it observed. "
                    "The recorded plans are kept, and the search goes on from them",
                    selector.name,
                    step[-1].episode,
                )
        selector.observe(proposals, [row.reward for row in step])


def _set_aside(folder: Path) -> None:
    """Rename the files of a search whose score has changed since."""
    for name in (EPISODES_FILE, SETUP_FILE):  # the setup last: without it, there is no search
        if (folder / name).exists():
            (folder / name).replace(folder / f"old-{name}")
    log.warning(
        "the score changed since %s was searched; its old rewards are not reused, the search begins anew "
        "(what was there is kept as old-%s and old-%s)",
        folder,
        SETUP_FILE,
        EPISODES_FILE,
    )


def _proposed(problem: SearchProblem, selector: Selector) -> list[Proposal]:
    """Return the selector's proposals; refuse what is none, such as a plugin's mistake."""
    proposals, name = selector.propose(), type(selector).__name__
    if not isinstance(proposals, list) or not all(isinstance(each, Proposal) for each in proposals):
        raise ConfigError(f"{name}.propose must return a list of Proposal, got {shown(proposals)}")
    try:
        return [replace(each, choices=problem.checked(each.choices)) for each in proposals]
    except ConfigError as error:
        raise ConfigError(f"{name}.propose: {error}") from error


def _affordable(proposals: list[Proposal], rows: Sequence[EpisodeRow], plans: int | None) -> list[Proposal]:
    """Return the first proposals, up to the one that reaches a limit of different plans."""
    if plans is None:
        return proposals
    known = {row.key for row in rows}
    for number, proposal in enumerate(proposals, 1):
        known.add(proposal.choices)
        if len(known) == plans:
            return proposals[:number]
    return proposals


def _limit(
    rows: Sequence[EpisodeRow], episodes: int, deadline: Deadline, patience: int | None, plans: int | None
) -> StoppedBy | None:
    if len(rows) >= episodes:
        return "episodes"
    if plans is not None and len({row.choices for row in rows}) >= plans:
        return "plans"
    if patience is not None and rows and len(rows) - best_rows(rows, 1)[0].episode >= patience:
        return "patience"
    return "seconds" if rows and deadline.over() else None
