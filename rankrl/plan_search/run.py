"""Run a search: propose, score and observe plans, save the state, resume, and finish on Ctrl-C."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from torch import Tensor

from decomposition.plan.plan import CompressionPlan
from rankrl.errors import CheckpointError, ConfigError
from rankrl.options.search import check_limits
from rankrl.plan_search.measured_plans import MeasuredPlan, as_rows
from rankrl.plan_search.scores.evaluation import (
    CANDIDATES_FILE,
    EPISODES_FILE,
    EpisodeRow,
    EpisodesFile,
    Evaluator,
    known_evaluations,
    make_row,
    write_candidates,
)
from rankrl.plan_search.scores.rewards import Reward, create_reward
from rankrl.plan_search.selectors.selector import Selector, SelectorState
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.state_file import damaged_state, read_state, write_state


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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
    """Loss and savings of one compressed layer."""

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


def as_numbers(layers: Sequence[LayerCost]) -> dict[str, Any]:
    """Return the section `layers` of metrics.json, empty if no layer was compressed."""
    return {"layers": [asdict(layer) for layer in layers]} if layers else {}


STATE_FILE = "search.safetensors"
_VERSION = 1


@dataclass(frozen=True)
class SearchState:
    """Progress of a search, saved for resuming."""

    identity: Mapping[str, Any]
    rows: tuple[EpisodeRow, ...]
    seconds: float
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the state, atomically."""
        content = {
            "identity": dict(self.identity),
            "rows": [vars(row) for row in self.rows],
            "seconds": self.seconds,
            "values": dict(self.values),
        }
        write_state(path, self.tensors, content, _VERSION)

    @classmethod
    def load(cls, path: Path) -> SearchState:
        """Read a state."""
        tensors, content = read_state(path, _VERSION, "search state")
        try:
            return cls(
                content["identity"],
                tuple(EpisodeRow(**row) for row in content["rows"]),
                float(content["seconds"]),
                tensors,
                content["values"],
            )
        except (KeyError, ValueError, TypeError) as error:
            raise damaged_state(path, "search state", error) from error

    def check(self, identity: Mapping[str, Any], path: Path) -> None:
        """Refuse to resume a search with another identity."""
        for key in self.differing(identity):
            raise CheckpointError(
                f"{path} belongs to another search: {key} was {self.identity.get(key)!r}, is now "
                f"{dict(identity).get(key)!r}. Use the same settings to resume, the number of threads too "
                "(OMP_NUM_THREADS: sums, and so fits, differ in their last bits), with a budget in time the "
                "machine and the cache too (RANKRL_CACHE: it keeps the times), or name another folder."
            )

    def differing(self, identity: Mapping[str, Any]) -> list[str]:
        """Return the names of the values in which the state differs from `identity`."""
        now = json.loads(json.dumps(dict(identity)))
        return [key for key in sorted({*now, *self.identity}) if now.get(key) != self.identity.get(key)]


log = logging.getLogger(__name__)

StoppedBy = Literal["episodes", "seconds", "patience", "interrupt", "selector"]


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a network on another device, estimated from the times of layers there."""

    share: float
    conditions: str
    networks: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class SearchResult:
    """The plan that a search chose, and its record."""

    plan: CompressionPlan
    row: EpisodeRow
    best: EpisodeRow
    rows: tuple[EpisodeRow, ...]
    seconds: float
    stopped_by: StoppedBy
    missed: str | None = None
    measured: tuple[MeasuredPlan, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    estimate: TimeEstimate | None = None

    @property
    def evaluations(self) -> int:
        """Number of different plans that were scored."""
        return sum(not row.cached for row in self.rows)


def search_numbers(result: SearchResult) -> dict[str, Any]:
    """Return the section `search` of metrics.json."""
    return {
        "episodes": len(result.rows),
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "best_reward": result.best.reward,
        "chosen_reward": result.row.reward,
        "chosen_episode": result.row.episode,
        "stopped_by": result.stopped_by,
        **({"measured": as_rows(result.measured, result.row.key)} if result.measured else {}),
        **({} if result.estimate is None else {"estimate": asdict(result.estimate)}),
    }


def with_row(
    problem: SearchProblem, result: SearchResult, row: EpisodeRow, missed: str | None = None
) -> SearchResult:
    """Return the result with another row's plan; `missed` says why the budget is not kept, if it is not."""
    return replace(result, plan=problem.plan(row.key, result.plan.chosen_by), row=row, missed=missed)


def best_rows(rows: Sequence[EpisodeRow], count: int) -> list[EpisodeRow]:
    """Return the rows of the `count` best different plans, best first, the earlier first among equals."""
    different = [row for row in rows if not row.cached]
    return sorted(different, key=lambda row: (-row.reward, row.episode))[:count]


def run_search(
    problem: SearchProblem,
    evaluator: Evaluator,
    selector: Selector,
    *,
    episodes: int,
    reward: Reward | None = None,
    seconds: float | None = None,
    patience: int | None = None,
    folder: Path | None = None,
    resume: bool = False,
    anew_for_other_scores: bool = False,
    on_set_aside: Callable[[], None] | None = None,
    on_episode: Callable[[EpisodeRow], None] | None = None,
) -> SearchResult:
    """Search with a selector for the plan with the best reward.

    With a folder, the state is written atomically after every step; with `resume`, a search killed at any
    moment continues to the same result, bit for bit.
    """
    check_limits(episodes, seconds, patience)
    reward = create_reward("accuracy", budgeted=problem.budget is not None) if reward is None else reward
    identity = _identity(problem, evaluator, selector, reward, episodes)
    rows: list[EpisodeRow] = []
    spent = 0.0
    path = None if folder is None else folder / STATE_FILE
    if path is not None and path.exists():
        if not resume:
            raise ConfigError(
                f"{folder} holds a search already; resume it, or choose another folder for a new one"
            )
        state = SearchState.load(path)
        if anew_for_other_scores and state.differing(identity) == ["evaluator"]:
            if on_set_aside is not None:
                on_set_aside()
            _set_aside(path.parent)
        else:
            state.check(identity, path)
            rows, spent = list(state.rows), state.seconds
            selector.restore(SelectorState(state.tensors, state.values))
            evaluator.restore(known_evaluations(problem, rows))
    table = None
    if folder is not None:
        write_candidates(problem, folder / CANDIDATES_FILE)
        table = EpisodesFile(folder / EPISODES_FILE, rows)
        selector.use_folder(folder)

    start = time.perf_counter() - spent
    stopped_by: StoppedBy | None = None
    with FinishOnInterrupt() as interrupt:
        while stopped_by is None:
            stopped_by = _limit(rows, episodes, seconds, patience, time.perf_counter() - start)
            if stopped_by is not None:
                break
            proposals = selector.propose()[: episodes - len(rows)]
            if not proposals:
                stopped_by = "selector"
                break
            evaluations = evaluator.evaluate([proposal.choices for proposal in proposals])
            rewards = [reward(evaluation) for evaluation in evaluations]
            first = len(rows)
            for proposal, evaluation, value in zip(proposals, evaluations, rewards, strict=True):
                rows.append(make_row(rows, proposal.choices, proposal.phase, evaluation, value))
            fresh = rows[first:]
            selector.observe(proposals, rewards)
            if path is not None and table is not None:
                memory = selector.state()
                spent = time.perf_counter() - start
                SearchState(identity, tuple(rows), spent, memory.tensors, memory.values).save(path)
                table.append(fresh)
            for row in fresh:
                if on_episode is not None:
                    on_episode(row)
            if interrupt.requested:
                stopped_by = "interrupt"
    if not rows:
        raise ConfigError(f"selector {selector.name!r} proposed no plan; check its options")
    best = best_rows(rows, 1)[0]
    return SearchResult(
        plan=problem.plan(best.key, selector.name),
        row=best,
        best=best,
        rows=tuple(rows),
        seconds=time.perf_counter() - start,
        stopped_by=stopped_by,
    )


def _identity(
    problem: SearchProblem, evaluator: Evaluator, selector: Selector, reward: Reward, episodes: int
) -> dict[str, Any]:
    return {
        "problem": problem.fingerprint,
        "evaluator": evaluator.fingerprint,
        "selector": selector.name,
        "selector options": dict(selector.options),
        "seed": selector.seed,
        "reward": [reward.name, dict(reward.options)],
        "episodes": episodes,  # selectors' schedules depend on it
    }


def _set_aside(folder: Path) -> None:
    """Rename the files of a search whose score has changed since."""
    for name in (STATE_FILE, EPISODES_FILE):
        if (folder / name).exists():
            (folder / name).replace(folder / f"old-{name}")
    log.warning(
        "the score changed since %s was searched; its old rewards are not reused, the search begins anew "
        "(what was there is kept as old-%s and old-%s)",
        folder,
        STATE_FILE,
        EPISODES_FILE,
    )


def _limit(
    rows: Sequence[EpisodeRow], episodes: int, seconds: float | None, patience: int | None, spent: float
) -> StoppedBy | None:
    """Return the limit that has been reached, if any."""
    if len(rows) >= episodes:
        return "episodes"
    if seconds is not None and spent >= seconds:
        return "seconds"
    if patience is not None and rows and len(rows) - best_rows(rows, 1)[0].episode >= patience:
        return "patience"
    return None
