"""Selectors side by side: one row for each search, their means and 95 % intervals."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from scipy.special import stdtrit

from rankrl.report.stages import UNKNOWN
from rankrl.wording import counted


@dataclass(frozen=True)
class ComparisonRow:
    """One search of one selector, a row of `compare.csv`."""

    selector: str
    seed: int | None
    best_reward: float
    heldout_accuracy: float
    params_kept: float
    macs_kept: float
    test_accuracy: float
    finetuned_accuracy: float | None
    episodes: int
    evaluations: int
    seconds: float
    best_rewards: tuple[float, ...]


COLUMNS = tuple(field.name for field in fields(ComparisonRow) if field.name != "best_rewards")
"""The columns of `compare.csv`, in order."""

MEASURES = COLUMNS[2:]
"""What means and spreads are taken of."""

_TITLES = {
    "best_reward": "Best reward",
    "heldout_accuracy": "Held-out accuracy, %",
    "params_kept": "Parameters kept, %",
    "macs_kept": "MACs kept, %",
    "test_accuracy": "Test accuracy, %",
    "finetuned_accuracy": "Fine-tuned, %",
    "evaluations": "Plans scored",
    "seconds": "Seconds",
}
SHORT = ("best_reward", "test_accuracy", "finetuned_accuracy")
"""The measures that fit on a terminal."""

PROGRESS_CAPTION = "Best reward after so many plans."

_WRITTEN = {
    "best_reward": (1.0, 4),
    "heldout_accuracy": (100.0, 2),
    "params_kept": (100.0, 1),
    "macs_kept": (100.0, 1),
    "test_accuracy": (100.0, 2),
    "finetuned_accuracy": (100.0, 2),
    "evaluations": (1.0, 0),
    "seconds": (1.0, 1),
}


_AFTER = (1, 5, 20, 50, 100, 200, 500, 1000)


def milestones(plans: int) -> list[int]:
    """Return after how many plans searches are compared, the last time after all of them."""
    return [*(after for after in _AFTER if after < plans), plans]


@dataclass(frozen=True)
class Spread:
    """One measure over all seeds."""

    mean: float
    std: float | None
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return that of one value for each seed, at least one."""
        mean, count = float(statistics.fmean(values)), len(values)
        if count < 2:
            return cls(mean, None, None)
        std = statistics.stdev(values)
        return cls(mean, std, float(stdtrit(count - 1, 0.975)) * std / count**0.5)

    def text(self, factor: float, digits: int) -> str:
        """Return `mean ± half_width`, each times a factor and with this number of decimals."""
        mean = f"{factor * self.mean:.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {factor * self.half_width:.{digits}f}"


def interval_note(counts: Iterable[int]) -> str:
    """Return what `mean ± half_width` is, in a sentence; empty where every mean is of one value."""
    several = sorted({count for count in counts if count > 1})
    if not several:
        return ""
    return f"mean ± half of its 95 % interval over {' or '.join(map(str, several))} seeds (Student's t)"


@dataclass(frozen=True)
class SelectorSummary:
    """The summary of one selector's searches."""

    selector: str
    runs: int
    measures: dict[str, Spread]


def summarise(rows: Sequence[ComparisonRow]) -> list[SelectorSummary]:
    """Return a summary of every selector, the highest mean reward first."""
    summaries = []
    for name in dict.fromkeys(row.selector for row in rows):
        runs = [row for row in rows if row.selector == name]
        measures = {}
        for measure in MEASURES:
            values = [getattr(row, measure) for row in runs if getattr(row, measure) is not None]
            if values:
                measures[measure] = Spread.of(values)
        summaries.append(SelectorSummary(name, len(runs), measures))
    return sorted(summaries, key=lambda summary: -summary.measures["best_reward"].mean)


def comparison_cells(
    rows: Sequence[ComparisonRow], measures: Sequence[str] = tuple(_TITLES)
) -> tuple[list[str], list[list[str]]]:
    """Return the table as text."""
    summaries = summarise(rows)
    taken = [name for name in measures if any(name in summary.measures for summary in summaries)]
    cells = [
        [summary.selector, str(summary.runs), *(_cell(summary.measures.get(name), name) for name in taken)]
        for summary in summaries
    ]
    return ["Selector", "Runs", *(_TITLES[name] for name in taken)], cells


def progress_cells(rows: Sequence[ComparisonRow]) -> tuple[list[str], list[list[str]]]:
    """Return as text how far searches had come after increasing numbers of plans."""
    longest = max(len(row.best_rewards) for row in rows)
    if longest == 1:
        return ["Selector"], []
    ends = milestones(longest)
    factor, digits = _WRITTEN["best_reward"]
    cells = []
    for summary in summarise(rows):
        runs = [row.best_rewards for row in rows if row.selector == summary.selector]
        known = (Spread.of([run[min(end, len(run)) - 1] for run in runs]) for end in ends)
        cells.append([summary.selector, *(spread.text(factor, digits) for spread in known)])
    return ["Selector", *(counted(end, "plan") for end in ends)], cells


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """Return the tables in Markdown."""
    columns, cells = progress_cells(rows)
    note = interval_note(summary.runs for summary in summarise(rows))
    explained = f"\nNumbers: {note}.\n" if note else ""
    progress = f"\n{PROGRESS_CAPTION}\n\n{_markdown(columns, cells)}" if cells else ""
    return f"{_markdown(*comparison_cells(rows))}{explained}{progress}"


def _markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def comparison_csv(rows: Sequence[ComparisonRow]) -> str:
    """Return `compare.csv`: one row for every search."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def _cell(spread: Spread | None, measure: str) -> str:
    if spread is None:
        return UNKNOWN
    return spread.text(*_WRITTEN[measure])
