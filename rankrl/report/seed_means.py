"""Runs that differ in their seed alone, as means with 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rankrl.report.comparison import Spread, interval_note
from rankrl.report.gather import GatheredRun
from rankrl.report.html_page import Table, text_table
from rankrl.report.stages import UNKNOWN
from rankrl.report.sweep_table import COLUMNS, Column, shown_columns, varied_columns, written

_CAPTION = "Runs that differ in nothing but their seed"
_NO_MEANS = ("seed", "folder", "best_in")


def mean_rows(runs: Sequence[GatheredRun]) -> list[dict[str, Any]]:
    """Return a row for all runs that differ in their seed alone, those that have ended."""
    rows = []
    columns = [column for column in (*varied_columns(runs), *COLUMNS) if column.key not in _NO_MEANS]
    for group in seed_groups(runs):
        row: dict[str, Any] = {"runs": len(group)}
        for column in columns:
            if not column.is_measure:
                row[column.key] = column.value(group[0])
                continue
            spread = _spread(group, column.value)
            row[column.key] = None if spread is None else spread.mean
            row[f"{column.key}_interval"] = None if spread is None else spread.half_width
        rows.append(row)
    return rows


def mean_table(runs: Sequence[GatheredRun]) -> Table | None:
    """Return the table of means for the page; None where no two runs differ in their seed alone."""
    groups = seed_groups(runs)
    if len(groups) == len(runs):
        return None
    columns = [column for column in shown_columns(runs) if column.key not in _NO_MEANS]
    cells = [[*(_cell(group, column) for column in columns), str(len(group))] for group in groups]
    words = [index for index, column in enumerate(columns) if column.is_text]
    caption = f"{_CAPTION}: {interval_note(map(len, groups))}."
    return text_table(caption, [*(column.title for column in columns), "Runs"], cells, text_columns=words)


def seed_groups(runs: Sequence[GatheredRun]) -> list[list[GatheredRun]]:
    """Return the runs that have ended, those together that differ in their seed alone."""
    finished = [run for run in runs if run.status == "finished"]
    columns = [
        column
        for column in (*varied_columns(finished), *COLUMNS)
        if not column.is_measure and column.key not in _NO_MEANS
    ]
    groups: dict[str, list[GatheredRun]] = {}
    for run in finished:
        groups.setdefault(repr([column.value(run) for column in columns]), []).append(run)
    return list(groups.values())


def _spread(runs: Sequence[GatheredRun], value: Callable[[GatheredRun], Any]) -> Spread | None:
    values = [number for number in map(value, runs) if number is not None]
    return Spread.of(values) if values else None


def _cell(group: Sequence[GatheredRun], column: Column) -> str:
    if not column.is_measure or column.write is None:
        return written(column, group[0])
    spread = _spread(group, column.value)
    if spread is None:
        return UNKNOWN
    mean = column.write(spread.mean)
    half = column.write(spread.half_width).lstrip("+") if spread.half_width else ""
    return f"{mean} ±\N{NO-BREAK SPACE}{half}" if half else mean
