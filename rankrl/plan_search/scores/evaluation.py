"""Hold evaluations of plans, and the history of a search."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rankrl.errors import StorageError
from rankrl.files import write_atomically, write_json
from rankrl.plan_search.space.problem import Choices, SearchProblem


@dataclass(frozen=True)
class Evaluation:
    score: float
    accuracy: float
    params: int
    macs: int
    params_kept: float
    macs_kept: float
    seconds: float
    cached: bool = False


class Evaluator(Protocol):
    """Scores the plans of a search, in this process or in many."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that scores depend on, except the plan."""

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans in order."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Replace the known evaluations; their plans are not scored again."""


@runtime_checkable
class MeasuresDivergences(Protocol):
    """An evaluator that can compress each site alone and measure the divergence of the outputs."""

    def divergences(self, batches: int) -> list[np.ndarray]:
        """Measure the divergence of the network's outputs when one site alone is compressed."""


class RememberingEvaluator(ABC):
    """Scores plans one after the other and remembers the evaluations."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._known: dict[Choices, Evaluation] = {}

    @abstractmethod
    def value(self, choices: Choices) -> Any:
        """Return the score of the network under a plan, or the outputs from which `scores` computes it."""

    def part(self, choices: Choices, start: int, stop: int) -> Any:
        """Return the value of a plan on batches `start` to `stop` alone, where there are batches."""
        del start, stop
        return self.value(choices)

    def scores(self, choices: Choices, value: Any) -> tuple[float, float]:
        """Return the score and the accuracy of a plan; a score that is a single number stands for both."""
        del choices
        return value, value

    def __call__(self, choices: Choices) -> Evaluation:
        """Score a plan; see `evaluate` for the errors."""
        known = self.known(choices)
        if known is not None:
            return known
        start = time.perf_counter()
        value = self.value(choices)
        return self.record(choices, value, time.perf_counter() - start)

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        return [self(choices) for choices in plans]

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        self._known = dict(known)

    def known(self, choices: Choices) -> Evaluation | None:
        known = self._known.get(tuple(choices))
        return None if known is None else replace(known, seconds=0.0, cached=True)

    def record(self, choices: Choices, value: Any, seconds: float) -> Evaluation:
        score, accuracy = self.scores(choices, value)
        cost = self.problem.cost(choices)
        evaluation = Evaluation(
            score=score,
            accuracy=accuracy,
            params=cost.params,
            macs=cost.macs,
            params_kept=cost.params / self.problem.params,
            macs_kept=cost.macs / self.problem.macs,
            seconds=seconds,
        )
        self._known[tuple(choices)] = evaluation
        return evaluation


EPISODES_FILE = "episodes.csv"
CANDIDATES_FILE = "candidates.json"


@dataclass(frozen=True)
class EpisodeRow:
    """One scored plan.

    Attributes:
        seconds: Time that scoring it took.
        actions: JSON of the numbers behind the plan from which the selector learns.
        elapsed: Seconds of the search up to the end of its step.
        ends_step: Whether it is the last plan of its step; those of one step are proposed together.
        within_budget: Whether it keeps the budget; a plan that does not is never the best.
    """

    episode: int
    reward: float
    score: float
    accuracy: float
    params_kept: float
    macs_kept: float
    best_reward: float
    cached: bool
    seconds: float
    phase: str
    choices: str
    actions: str = "[]"
    elapsed: float = 0.0
    ends_step: bool = True
    within_budget: bool = True

    @property
    def key(self) -> Choices:
        """The candidate of every site, by index."""
        return tuple(json.loads(self.choices))


EPISODE_COLUMNS = tuple(column.name for column in fields(EpisodeRow))
"""The columns of `episodes.csv`, in order."""
_END = "\r\n"


def make_row(
    before: Sequence[EpisodeRow],
    choices: Choices,
    phase: str,
    evaluation: Evaluation,
    reward: float,
    actions: Sequence[float] = (),
    *,
    within_budget: bool = True,
) -> EpisodeRow:
    """Make the row of an evaluation; `before` are the rows of all earlier plans."""
    found = any(row.within_budget for row in before)
    if found and not within_budget:
        best = before[-1].best_reward
    elif before and found == within_budget:
        best = max(reward, before[-1].best_reward)
    else:  # the first plan, or the first within the budget
        best = reward
    return EpisodeRow(
        episode=len(before) + 1,
        reward=reward,
        score=evaluation.score,
        accuracy=evaluation.accuracy,
        params_kept=evaluation.params_kept,
        macs_kept=evaluation.macs_kept,
        best_reward=best,
        cached=evaluation.cached,
        seconds=evaluation.seconds,
        phase=phase,
        choices=json.dumps([int(choice) for choice in choices], separators=(",", ":")),
        actions=json.dumps(list(actions), separators=(",", ":")),
        within_budget=within_budget,
    )


def best_rows(rows: Sequence[EpisodeRow], count: int) -> list[EpisodeRow]:
    """Return the best different plans, the earlier first among equals; over the budget only if all are."""
    allowed = [row for row in rows if row.within_budget] or rows
    different = {row.key: row for row in reversed(allowed)}.values()  # the first of equal plans
    return sorted(different, key=lambda row: (-row.reward, row.episode))[:count]


def known_evaluations(problem: SearchProblem, rows: Sequence[EpisodeRow]) -> dict[Choices, Evaluation]:
    return {
        row.key: Evaluation(
            score=row.score,
            accuracy=row.accuracy,
            params=round(row.params_kept * problem.params),
            macs=round(row.macs_kept * problem.macs),
            params_kept=row.params_kept,
            macs_kept=row.macs_kept,
            seconds=row.seconds,
        )
        for row in rows
        if not row.cached
    }


def write_candidates(problem: SearchProblem, path: Path) -> None:
    """Write the candidates of every site, in the order that the choices of `episodes.csv` index."""
    content = {
        site.name: [
            {
                "operations": candidate.content(),
                "params": candidate.cost.params,
                "macs": candidate.cost.macs,
                "time": candidate.cost.time,
                "error": candidate.error,
            }
            for candidate in site.candidates
        ]
        for site in problem.sites
    }
    write_json(path, content)


class EpisodesFile:
    """`episodes.csv`: gets a line for every episode, and is rewritten when a search is resumed."""

    def __init__(self, path: Path, rows: Sequence[EpisodeRow]) -> None:
        self.path = path
        write_atomically(path, ",".join(EPISODE_COLUMNS) + _END + _lines(rows))

    def append(self, rows: Sequence[EpisodeRow]) -> None:
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(_lines(rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror or error}. Make room on the disk and resume the "
                "search"
            ) from error


def recorded_steps(text: str) -> list[list[EpisodeRow]]:
    """Parse `episodes.csv`, step by step; what a kill left of a last step is dropped."""
    rows = parse_rows(text[: text.rfind(_END) + len(_END)])
    if [row.episode for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError("the episodes are not numbered 1, 2, 3, ...")
    for row in rows:
        json.loads(row.choices), json.loads(row.actions)
    ends = [row.episode for row in rows if row.ends_step]
    return [rows[first:end] for first, end in pairwise((0, *ends))]


def parse_rows(text: str) -> list[EpisodeRow]:
    """Parse `episodes.csv`; a `ValueError` says what is damaged. Columns of later versions may be missing."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = reader.fieldnames or ()
    missing = [each.name for each in fields(EpisodeRow) if each.default is MISSING and each.name not in names]
    if missing:
        raise ValueError(f"it lacks the columns {', '.join(missing)}; it must be a rankrl run's own")
    known = [each for each in fields(EpisodeRow) if each.name in names]
    return [
        EpisodeRow(**{each.name: _value(each, row[each.name], reader.line_num) for each in known})
        for row in reader
    ]


def _value(column: Field[Any], text: str | None, line: int) -> Any:
    if column.type == "str":
        return text or ""
    if column.type == "bool":
        return text == str(True)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"line {line}: {column.name} is {text!r}; it must be a finite number")
    return int(value) if column.type == "int" else value


def _lines(rows: Sequence[EpisodeRow]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator=_END).writerows(list(vars(row).values()) for row in rows)
    return text.getvalue()
