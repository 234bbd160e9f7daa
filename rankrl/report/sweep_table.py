"""The table of many runs: what they varied, what they came to; on the page and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rankrl.report.gather import GatheredRun
from rankrl.report.html_page import Cell
from rankrl.report.stages import (
    UNCHANGED,
    UNKNOWN,
    Stage,
    format_accuracy,
    format_bytes,
    format_count,
    format_large,
    format_latency,
    number,
    ratio,
)


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: Its name in the CSV file.
        title: Its title on the page.
        value: What a run has there; None where it has nothing.
        write: How a number is written on the page; None for words.
        optional: Whether it is left out of the page where all runs have the same.
        words: What is written instead of a run's number, where there is something to be said.
    """

    key: str
    title: str
    value: Callable[[GatheredRun], Any]
    write: Callable[[float | None], str] | None = None
    optional: bool = False
    words: Callable[[GatheredRun], str | None] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it holds words."""
        return self.write is None


def _final(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.final is None else getattr(run.final, name)


def _dense(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.baseline is None else getattr(run.baseline, name)


def _change(run: GatheredRun) -> float | None:
    before: Stage | None = run.baseline
    after = run.final
    if before is None or after is None or before.accuracy is None or after.accuracy is None:
        return None
    return 100 * (after.accuracy - before.accuracy)


def _reduction(measure: str, attribute: str) -> Callable[[GatheredRun], float | None]:
    def value(run: GatheredRun) -> float | None:
        return ratio(run.metrics, measure, _dense(attribute)(run), _final(attribute)(run))

    return value


def _write_points(points: float | None) -> str:
    return UNKNOWN if points is None else f"{points:+.2f}".replace("-", "−")


def _write_ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"


def _unchanged(run: GatheredRun) -> str | None:
    return UNCHANGED if run.latency_change == UNCHANGED else None


COLUMNS = (
    Column("method", "Method", lambda run: run.method.replace("_", " ")),
    Column("budget", "Budget", lambda run: run.budget, optional=True),
    Column("model", "Model", lambda run: run.named("model"), optional=True),
    Column("dataset", "Dataset", lambda run: run.named("dataset"), optional=True),
    Column("selector", "Selector", lambda run: run.named("selector"), optional=True),
    Column("task", "Task", lambda run: run.named("task"), optional=True),
    Column("seed", "Seed", lambda run: run.metrics.get("seed"), lambda seed: f"{seed:g}", optional=True),
    Column("accuracy", "Test accuracy", _final("accuracy"), format_accuracy),
    Column("accuracy_change_points", "Change, points", _change, _write_points),
    Column("params", "Parameters", _final("params"), format_count),
    Column("params_ratio", "Fewer parameters", _reduction("params", "params"), _write_ratio),
    Column("macs", "MACs", _final("macs"), format_large),
    Column("macs_ratio", "Fewer MACs", _reduction("macs", "macs"), _write_ratio),
    Column("latency_ms", "Latency", _final("latency_ms"), format_latency),
    Column("latency_ratio", "Faster", _reduction("latency", "latency_ms"), _write_ratio, words=_unchanged),
    Column("file_bytes", "File", lambda run: number(run.metrics, "onnx", "file_bytes"), format_bytes),
    Column("best_in", "Best in", lambda run: ", ".join(run.best_in)),
    Column("folder", "Folder", lambda run: str(run.folder)),
)

_DENSE_COLUMNS = ("accuracy", "params", "macs", "latency_ms")


def shown_columns(runs: Sequence[GatheredRun]) -> list[Column]:
    """Return the columns in which a run has something, and the optional ones only where runs differ."""
    shown = []
    for column in COLUMNS:
        values = {column.value(run) for run in runs} - {None, ""}
        if values and (len(values) > 1 or not column.optional):
            shown.append(column)
    return shown


def shared_values(runs: Sequence[GatheredRun]) -> dict[str, str]:
    """Return what all runs have in common, by title."""
    shared = {}
    for column in COLUMNS:
        values = {column.value(run) for run in runs} - {None, ""}
        if column.optional and len(values) == 1:
            shared[column.title] = str(values.pop())
    return shared


def table_rows(runs: Sequence[GatheredRun], columns: Sequence[Column]) -> list[list[Cell]]:
    """Return the cells of every run, the most accurate first; the first cell leads to the run's own page."""

    def order(run: GatheredRun) -> float:
        accuracy = _final("accuracy")(run)
        return 1.0 if accuracy is None else -accuracy

    rows = []
    for run in sorted(runs, key=order):
        page = f"{quote(run.folder.as_posix())}/report.html" if run.has_page else None
        cells = []
        for index, column in enumerate(columns):
            value = column.value(run)
            if column.write is None:
                text = str(value or UNKNOWN)
            else:
                words = None if column.words is None else column.words(run)
                text = words or (UNKNOWN if value is None else column.write(value))
            cells.append(Cell(text, value, page if index == 0 else None))
        rows.append(cells)
    return rows


def runs_csv(runs: Sequence[GatheredRun]) -> str:
    """Return all runs as CSV text: plain numbers, the dense network's too, and what failed."""
    text = io.StringIO()
    writer = csv.writer(text)
    dense = [f"baseline_{name}" for name in _DENSE_COLUMNS]
    writer.writerow(["folder", "status", *(c.key for c in COLUMNS if c.key != "folder"), *dense, "error"])
    for run in runs:
        values = [column.value(run) for column in COLUMNS if column.key != "folder"]
        before = [_dense(name)(run) for name in _DENSE_COLUMNS]
        writer.writerow([run.folder, run.status, *values, *before, run.error])
    return text.getvalue()
