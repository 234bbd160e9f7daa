"""Selectors side by side: one row for each search, and their means and spreads."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from rankrl.report.stages import UNKNOWN


@dataclass(frozen=True)
class ComparisonRow:
    """One search of one selector, a row of `compare.csv`.

    Attributes:
        selector: The selector.
        seed: Its seed; None for one that draws nothing.
        best_reward: Reward of the plan it ended with.
        heldout_accuracy: That plan's accuracy on the held-out images it was scored on, a fraction.
        params_kept: Fraction of the network's parameters that the plan keeps.
        macs_kept: Fraction of the network's multiply-accumulates that the plan keeps.
        test_accuracy: Accuracy of the rewritten network on the test set, before any fine-tuning.
        finetuned_accuracy: The same after fine-tuning; None without it.
        episodes: Plans proposed.
        evaluations: Different plans scored.
        seconds: Wall time of the search.
        best_rewards: Best reward so far after every episode.
    """

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


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the seeds; the latter None for a single search."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class SelectorSummary:
    """What the searches of one selector have in common.

    Attributes:
        selector: The selector.
        runs: Its searches.
        measures: Spread of each of `MEASURES` that was taken.
    """

    selector: str
    runs: int
    measures: dict[str, Spread]


def summarise(rows: Sequence[ComparisonRow]) -> list[SelectorSummary]:
    """Return a summary of every selector, the highest mean reward first."""
    found = []
    for name in dict.fromkeys(row.selector for row in rows):
        runs = [row for row in rows if row.selector == name]
        measures = {}
        for measure in MEASURES:
            values = [getattr(row, measure) for row in runs if getattr(row, measure) is not None]
            if values:
                std = statistics.stdev(values) if len(values) > 1 else None
                measures[measure] = Spread(float(statistics.fmean(values)), std)
        found.append(SelectorSummary(name, len(runs), measures))
    return sorted(found, key=lambda summary: -summary.measures["best_reward"].mean)


def comparison_cells(
    rows: Sequence[ComparisonRow], measures: Sequence[str] = tuple(_TITLES)
) -> tuple[list[str], list[list[str]]]:
    """Return the table as text.

    Args:
        rows: The searches.
        measures: What to show; what was not measured is left out.

    Returns:
        Titles, and a row for every selector with `mean ± spread` in its cells.
    """
    summaries = summarise(rows)
    taken = [name for name in measures if any(name in summary.measures for summary in summaries)]
    cells = [
        [summary.selector, str(summary.runs), *(_cell(summary.measures.get(name), name) for name in taken)]
        for summary in summaries
    ]
    return ["Selector", "Runs", *(_TITLES[name] for name in taken)], cells


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """Return the table in Markdown."""
    columns, cells = comparison_cells(rows)
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
    factor, digits = _WRITTEN[measure]
    text = f"{factor * spread.mean:.{digits}f}"
    return text if spread.std is None else f"{text} ± {factor * spread.std:.{digits}f}"
