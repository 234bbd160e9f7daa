"""Make the columns, rows and CSV text of a table of many runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

from rankrl.report.html_page import Cell
from rankrl.report.run_folder import GatheredRun
from rankrl.report.run_tables import (
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
    score_quality,
)
from rankrl.runs.run_folder import COMPRESS

BUDGET = "budget."
"""Prefix of the names of budgets."""

# Options that have a column of their own in the table.
_HAVE_COLUMNS = (
    *("task", "seed", "model", "model.architecture", "dataset", "dataset.name", "decomposition"),
    *("decomposition.format", "selector", "selector.name", "pruner", "pruner.name"),
)
# Keys that name the choice of a group in a configuration.
_NAMES = ("name", "format", "architecture")
Option = str | int | float | bool | None


class Configured(Protocol):
    """A run with a known configuration."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, nested."""

    @property
    def overrides(self) -> Sequence[str]:
        """The overrides of its configuration, such as `optim.lr=0.001`."""

    @property
    def budgets(self) -> Mapping[str, Any]:
        """The budgets that are set, by measure."""


def option(run: Configured, name: str) -> Option:
    """Return the value of an option, lists as JSON."""
    if name.startswith(BUDGET):
        return _plain(run.budgets.get(name.removeprefix(BUDGET)))
    value: Any = run.config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None or isinstance(value, Mapping):
        texts = dict(_split(override) for override in run.overrides)
        choices = [value[key] for key in _NAMES if key in value] if isinstance(value, Mapping) else []
        value = texts.get(name, choices[0] if choices else None)
    return _plain(value)


def varied_options(runs: Sequence[Configured]) -> list[str]:
    """Return the names of the options in which runs differ, except those with a column of their own."""
    names = dict.fromkeys(name for run in runs for name in _asked(run))
    return [
        name
        for name in names
        if name not in _HAVE_COLUMNS and len({repr(option(run, name)) for run in runs}) > 1
    ]


def _asked(run: Configured) -> list[str]:
    budgets = [f"{BUDGET}{name}" for name in run.budgets]
    if run.overrides:
        return [*(_split(override)[0] for override in run.overrides), *budgets]
    return [*(_leaves(run.config) if run.config.get("task") == COMPRESS else ()), *budgets]


def _leaves(config: Mapping[str, Any], within: str = "") -> list[str]:
    names: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            names += _leaves(value, f"{within}{key}.")
        elif within or key not in ("drop", "minimise", "params", "macs", "bytes", "latency"):
            names.append(f"{within}{key}")
    return names


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+~").partition("=")
    return name, value


def _plain(value: Any) -> Option:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str
    title: str
    value: Callable[[GatheredRun], Any]
    write: Callable[[float | None], str] | None = None
    optional: bool = False
    words: Callable[[GatheredRun], str | None] | None = None
    is_measure: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds words."""
        return self.write is None


def _final(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.final is None else getattr(run.final, name)


def _dense(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.baseline is None else getattr(run.baseline, name)


def _accuracy(run: GatheredRun) -> float | None:
    """Return the accuracy of the run's last network, which may be the dense one."""
    last = run.final or run.baseline
    return None if last is None else last.accuracy


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


def _write_number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def _write_ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"


def _unchanged(run: GatheredRun) -> str | None:
    return UNCHANGED if run.latency_change == UNCHANGED else None


def _score(run: GatheredRun) -> float | None:
    return run.final.score if run.final is not None and run.metrics.get("score_name") else None


def _write_score(run: GatheredRun) -> str | None:
    quality = score_quality(run.metrics)
    return None if quality is None else quality.write(quality.after)


def _measure(
    key: str, title: str, value: Callable[[GatheredRun], Any], write: Callable[[float | None], str]
) -> Column:
    return Column(key, title, value, write, is_measure=True)


SCORE = "score"
COLUMNS = (
    Column("method", "Method", lambda run: run.method.replace("_", " ")),
    Column("budget", "Budget", lambda run: run.budget, optional=True),
    Column("model", "Model", lambda run: run.named("model"), optional=True),
    Column("dataset", "Dataset", lambda run: run.named("dataset"), optional=True),
    Column("selector", "Selector", lambda run: run.named("selector"), optional=True),
    Column("task", "Task", lambda run: run.named("task"), optional=True),
    Column("seed", "Seed", lambda run: run.metrics.get("seed"), lambda seed: f"{seed:g}", optional=True),
    Column("score_name", "Scored by", lambda run: run.named("score_name"), optional=True),
    Column(SCORE, "Score", _score, _write_number, words=_write_score, is_measure=True),
    _measure("accuracy", "Test accuracy", _accuracy, format_accuracy),
    _measure("accuracy_change_points", "Change, points", _change, _write_points),
    _measure("agreement", "Agreement", _final("agreement"), format_accuracy),
    _measure("params", "Parameters", _final("params"), format_count),
    _measure("params_ratio", "Fewer parameters", _reduction("params", "params"), _write_ratio),
    _measure("macs", "MACs", _final("macs"), format_large),
    _measure("macs_ratio", "Fewer MACs", _reduction("macs", "macs"), _write_ratio),
    _measure("latency_ms", "Latency", _final("latency_ms"), format_latency),
    Column(
        "latency_ratio",
        "Faster",
        _reduction("latency", "latency_ms"),
        _write_ratio,
        words=_unchanged,
        is_measure=True,
    ),
    _measure("file_bytes", "File", lambda run: number(run.metrics, "onnx", "file_bytes"), format_bytes),
    Column("best_in", "Best in", lambda run: ", ".join(run.best_in)),
    Column("folder", "Folder", lambda run: str(run.folder)),
)

_DENSE_COLUMNS = ("accuracy", "params", "macs", "latency_ms")


def varied_columns(runs: Sequence[GatheredRun]) -> list[Column]:
    """Return a column for every option in which runs differ and that has no fixed column."""
    taken = {column.key for column in COLUMNS}
    return [_varied(name, runs) for name in varied_options(runs) if name not in taken]


def _varied(name: str, runs: Sequence[GatheredRun]) -> Column:
    values = [option(run, name) for run in runs]
    are_words = any(isinstance(value, str | bool) for value in values)
    return Column(name, name, lambda run: option(run, name), None if are_words else _write_number)


def shown_columns(runs: Sequence[GatheredRun]) -> list[Column]:
    """Return the columns with a value in some run, optional ones only if runs differ in them.

    Options in which runs differ follow the words; budgets have one column together.
    """
    shown = []
    for column in COLUMNS:
        if column.key == SCORE:
            shown += [each for each in varied_columns(runs) if not each.key.startswith(BUDGET)]
        values = {column.value(run) for run in runs} - {None, ""}
        if values and (len(values) > 1 or not column.optional):
            shown.append(_titled(column, runs))
    return shown


def _titled(column: Column, runs: Sequence[GatheredRun]) -> Column:
    """Return the column of the score under its name, if all runs have the same name for it."""
    names = {run.named("score_name") for run in runs} - {""}
    return replace(column, title=names.pop()) if column.key == SCORE and len(names) == 1 else column


def shared_values(runs: Sequence[GatheredRun]) -> dict[str, str]:
    """Return the values that all runs share, by title."""
    shared = {}
    for column in COLUMNS:
        values = {column.value(run) for run in runs} - {None, ""}
        if column.optional and len(values) == 1:
            shared[column.title] = str(values.pop())
    return shared


def written(column: Column, run: GatheredRun) -> str:
    """Return a run's value in a column as text for the page."""
    value = column.value(run)
    if column.write is None:
        return UNKNOWN if value in (None, "") else str(value)
    words = None if column.words is None else column.words(run)
    return words or (UNKNOWN if value is None else column.write(value))


def table_rows(runs: Sequence[GatheredRun], columns: Sequence[Column]) -> list[list[Cell]]:
    """Return the cells of every run, the best first; the first cell links to the run's own page."""

    def order(run: GatheredRun) -> float:
        known = [value for value in (_accuracy(run), _score(run)) if value is not None]
        return -known[0] if known else math.inf

    rows = []
    for run in sorted(runs, key=order):
        page = f"{quote(run.folder.as_posix())}/report.html" if run.has_page else None
        rows.append(
            [Cell(written(column, run), page if index == 0 else None) for index, column in enumerate(columns)]
        )
    return rows


def run_rows(runs: Sequence[GatheredRun]) -> list[dict[str, Any]]:
    """Return a row for every run: the options in which they differ, plain numbers, and errors."""
    columns = [*varied_columns(runs), *(column for column in COLUMNS if column.key != "folder")]
    return [
        {
            "folder": str(run.folder),
            "status": run.status,
            **{column.key: column.value(run) for column in columns},
            **{f"baseline_{name}": _dense(name)(run) for name in _DENSE_COLUMNS},
            "error": run.error,
        }
        for run in runs
    ]


def runs_csv(runs: Sequence[GatheredRun]) -> str:
    """Return all runs as CSV text, with the columns of `run_rows`."""
    text, rows = io.StringIO(), run_rows(runs)
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
