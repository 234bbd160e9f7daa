"""Record a search as one row for every scored plan, in memory and in `episodes.csv`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rankrl.errors import StorageError
from rankrl.files import write_atomically, write_json
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.space.problem import Choices, SearchProblem

EPISODES_FILE = "episodes.csv"
CANDIDATES_FILE = "candidates.json"


@dataclass(frozen=True)
class EpisodeRow:
    """One scored plan."""

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

    @property
    def key(self) -> Choices:
        """The candidate of every site, by index."""
        return tuple(json.loads(self.choices))


def make_row(
    before: Sequence[EpisodeRow], choices: Choices, phase: str, evaluation: Evaluation, reward: float
) -> EpisodeRow:
    """Make the row of an evaluation; `before` are the rows of all earlier plans."""
    best = max(reward, before[-1].best_reward) if before else reward
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
    )


def known_evaluations(problem: SearchProblem, rows: Sequence[EpisodeRow]) -> dict[Choices, Evaluation]:
    """Return the evaluations that the rows record, by choices."""
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
        header = ",".join(field.name for field in fields(EpisodeRow)) + "\r\n"
        write_atomically(path, header + _lines(rows))

    def append(self, rows: Sequence[EpisodeRow]) -> None:
        """Add rows."""
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(_lines(rows))
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror or error}. Make room on the disk and resume the "
                "search"
            ) from error


def _lines(rows: Sequence[EpisodeRow]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(list(vars(row).values()) for row in rows)
    return text.getvalue()
