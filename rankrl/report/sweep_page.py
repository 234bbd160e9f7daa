"""Gather the results of many runs: table, CSV file, means over seeds, Pareto fronts, and their page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args
from urllib.parse import quote

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from rich import table as terminal

from rankrl.errors import counted
from rankrl.files import write_atomically
from rankrl.report.comparison import Spread, interval_note
from rankrl.report.figures import (
    PALETTE,
    WIDE,
    Drawing,
    drawing,
    is_narrow,
    method_styles,
    panels,
    percent_axis,
    style_axes,
    upper_legend,
)
from rankrl.report.run_folder import GatheredRun, Status, date_line, gather_runs
from rankrl.report.run_tables import (
    UNCHANGED,
    UNKNOWN,
    Stage,
    Table,
    dense_int8,
    format_accuracy,
    format_bytes,
    format_count,
    format_large,
    format_latency,
    format_ratio,
    number,
    ratio,
    score_measure,
)
from rankrl.report.write import Head, render, run_title
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


def option(run: GatheredRun, name: str) -> Option:
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


def varied_options(runs: Sequence[GatheredRun]) -> list[str]:
    """Return the names of the options in which runs differ, except those with a column of their own."""
    names = dict.fromkeys(name for run in runs for name in _asked(run))
    return [
        name
        for name in names
        if name not in _HAVE_COLUMNS and len({repr(option(run, name)) for run in runs}) > 1
    ]


def _asked(run: GatheredRun) -> list[str]:
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
    write: Callable[[float], str] | None = None
    optional: bool = False
    words: Callable[[GatheredRun], str | None] | None = None
    is_measure: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds words."""
        return self.write is None

    def text(self, value: Any) -> str:
        """Write a value of the column."""
        if value in (None, ""):
            return UNKNOWN
        return str(value) if self.write is None else self.write(value).replace("-", "−")


def _final(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.final is None else getattr(run.final, name)


def _dense(name: str) -> Callable[[GatheredRun], Any]:
    return lambda run: None if run.baseline is None else getattr(run.baseline, name)


def _accuracy(run: GatheredRun) -> float | None:
    """Return the accuracy of the run's last network, which may be the dense one."""
    last = run.final or run.baseline
    return None if last is None else last.accuracy


def _change(run: GatheredRun) -> float | None:
    before, after = run.baseline, run.final
    if before is None or after is None or before.accuracy is None or after.accuracy is None:
        return None
    return 100 * (after.accuracy - before.accuracy)


def _reduction(measure: str, attribute: str) -> Callable[[GatheredRun], float | None]:
    def value(run: GatheredRun) -> float | None:
        return ratio(run.metrics, measure, _dense(attribute)(run), _final(attribute)(run))

    return value


_write_number = "{:g}".format
_write_ratio = "{:.2f}×".format


def _score(run: GatheredRun) -> float | None:
    return run.final.score if run.final is not None and run.metrics.get("score_name") else None


def _write_score(run: GatheredRun) -> str | None:
    score = score_measure(run.metrics)
    return None if score is None else score.write(score.after)


_measure = partial(Column, is_measure=True)

SCORE = "score"
COLUMNS = (
    Column("method", "Method", lambda run: run.method.replace("_", " ")),
    Column("budget", "Budget", lambda run: run.budget, optional=True),
    Column("model", "Model", lambda run: run.named("model"), optional=True),
    Column("dataset", "Dataset", lambda run: run.named("dataset"), optional=True),
    Column("selector", "Selector", lambda run: run.named("selector"), optional=True),
    Column("task", "Task", lambda run: run.named("task"), optional=True),
    Column("seed", "Seed", lambda run: run.metrics.get("seed"), _write_number, optional=True),
    Column("score_name", "Scored by", lambda run: run.named("score_name"), optional=True),
    _measure(SCORE, "Score", _score, _write_number, words=_write_score),
    _measure("accuracy", "Test accuracy", _accuracy, format_accuracy),
    _measure("accuracy_change_points", "Change, points", _change, "{:+.2f}".format),
    _measure("agreement", "Agreement", _final("agreement"), format_accuracy),
    _measure("params", "Parameters", _final("params"), format_count),
    _measure("params_ratio", "Fewer parameters", _reduction("params", "params"), _write_ratio),
    _measure("macs", "MACs", _final("macs"), format_large),
    _measure("macs_ratio", "Fewer MACs", _reduction("macs", "macs"), _write_ratio),
    _measure("latency_ms", "Latency", _final("latency_ms"), format_latency),
    _measure(
        *("latency_ratio", "Faster", _reduction("latency", "latency_ms"), _write_ratio),
        words=lambda run: UNCHANGED if run.latency_change == UNCHANGED else None,
    ),
    _measure("file_bytes", "File", _final("file_bytes"), format_bytes),
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


def _written(column: Column, run: GatheredRun) -> str:
    words = None if column.words is None else column.words(run)
    return words or column.text(column.value(run))


def _best_first(runs: Sequence[GatheredRun]) -> list[GatheredRun]:
    """Sort runs by accuracy, else by score, the best first."""

    def order(run: GatheredRun) -> float:
        known = [value for value in (_accuracy(run), _score(run)) if value is not None]
        return -known[0] if known else math.inf

    return sorted(runs, key=order)


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


_TITLES = {
    "accuracy": "Accuracy",
    "accuracy_change_points": "Points",
    "params_ratio": "Params",
    "macs_ratio": "MACs",
    "latency_ratio": "Latency",
}
_NOTE = "2.00×: half of the dense network's"
_MOST_ROWS = 40
_NAME = 28  # characters of a run's name in a line


def results_table(folder: str | Path) -> terminal.Table:
    """Return the finished runs below a folder for the terminal, the best first."""
    runs = _best_first([run for run in gather_runs(folder) if run.status == "finished"])
    columns = {column.key: column for column in shown_columns(runs)}
    shown = [columns[key] for key in ("folder", SCORE, *_TITLES) if key in columns]
    more = [f"{counted(len(runs) - _MOST_ROWS, 'more run')}"] if len(runs) > _MOST_ROWS else []
    note = [_NOTE] if "params_ratio" in columns else []
    page = f"`rankrl task=report runs={folder}` writes the page"
    rows = [[_written(column, run) for column in shown] for run in runs[:_MOST_ROWS]]
    return Table(
        "; ".join([*more, *note, page]),
        [_TITLES.get(column.key, column.title) for column in shown],
        [[_broken(name), *row] for name, *row in rows],
    ).printed(title=counted(len(runs), "finished run"))


def _broken(name: str) -> str:
    """Break a job's name between its options."""
    lines = wrap(name.replace("+", "+ "), _NAME, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("+ ", "+")


_NEAR = 0.01  # of accuracy, the loss that a headline accepts

COSTS = {"params": "parameters", "macs": "MACs", "latency": "latency ÷ dense", "bytes": "bytes of the file"}
"""Measures on the horizontal axes of accuracy, and the axes' labels.

Milliseconds of runs that were measured at different times, on a machine that was more or less busy, do not
compare; shares of the dense network's, timed in turns with each run's file, do.
"""

ALL_AT_ONCE = "all at once"
"""The measure in which a run is best that no other run beats in all measures."""

Network = tuple[str, str, float]
Point = tuple[float, float]
"""Cost and accuracy."""


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto-optimal points, by rising cost.

    A point is dominated by one that costs no more, is no less accurate, and is better in one of the two.
    """
    front: list[Point] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


@dataclass(frozen=True)
class CostPoints:
    """Cost and accuracy of runs, of their dense networks, and of those in 8-bit integers."""

    runs: list[tuple[GatheredRun, Point]]
    dense: dict[Network, Point]
    integers: dict[Network, Point]

    @property
    def front(self) -> list[Point]:
        """The Pareto front of all of them."""
        points = [point for _, point in self.runs]
        return pareto_front([*points, *self.dense.values(), *self.integers.values()])


def cost_points(runs: Sequence[GatheredRun], cost: str) -> CostPoints:
    """Find the points of the runs whose accuracy and cost were measured, and of their dense networks.

    In integers it has the dense network's parameters and MACs, so that it competes in time and bytes only.
    """
    found = CostPoints([], {}, {})
    for run in runs:
        value = run_costs(run).get(cost)
        if run.final is None or run.final.accuracy is None or value is None:
            continue
        found.runs.append((run, (value, run.final.accuracy)))
        dense, integers = run.baseline, dense_int8(run.metrics)
        timed = 1.0 if dense is not None and dense.latency_ms is not None else None
        _add_point(found.dense, run, dense, _costs(dense, timed).get(cost))
        if cost in ("latency", "bytes"):
            faster = number(run.metrics, "dense_int8", "latency_ratio")
            _add_point(found.integers, run, integers, _costs(integers, faster).get(cost))
    return found


def _add_point(
    points: dict[Network, Point], run: GatheredRun, stage: Stage | None, value: float | None
) -> None:
    if stage is not None and stage.accuracy is not None and value is not None:
        points[dense_network(run)] = (value, stage.accuracy)


def run_costs(run: GatheredRun) -> dict[str, float]:
    """Return the known costs of a run's last network, by measure."""
    before, after = (None if stage is None else stage.latency_ms for stage in (run.baseline, run.final))
    return _costs(run.final, ratio(run.metrics, "latency", before, after))


def _costs(stage: Stage | None, faster: float | None) -> dict[str, float]:
    if stage is None:
        return {}
    latency = 1 / faster if faster else None
    costs = {"params": stage.params, "macs": stage.macs, "latency": latency, "bytes": stage.file_bytes}
    return {name: value for name, value in costs.items() if value is not None}


def dense_network(run: GatheredRun) -> Network:
    """Return the identity of a run's dense network: model, dataset and accuracy."""
    accuracy = None if run.baseline is None else run.baseline.accuracy
    return run.named("model"), run.named("dataset"), math.nan if accuracy is None else accuracy


def with_fronts(runs: Sequence[GatheredRun]) -> list[GatheredRun]:
    """Return the runs with the measures in which each is Pareto-optimal (`GatheredRun.best_in`).

    They are the costs in which it is on the front (dense networks in floating point and in 8-bit integers
    compete, too), and `all at once` if no other run dominates it in accuracy and all measured costs.
    """
    best: dict[Path, list[str]] = {run.folder: [] for run in runs}
    for cost, name in COSTS.items():
        points = cost_points(runs, cost)
        front = set(points.front)
        for run, point in points.runs:
            if point in front:
                best[run.folder].append(name.partition(" ")[0])
    measured = [(run, _all_costs(run)) for run in runs]
    for run, mine in measured:
        if len(mine) > 2 and not any(_beats(others, mine) for _, others in measured):
            best[run.folder].append(ALL_AT_ONCE)
    return [replace(run, best_in=tuple(best[run.folder])) for run in runs]


def _all_costs(run: GatheredRun) -> dict[str, float]:
    """Return a run's costs and its error (1 - accuracy), all of them to be minimised."""
    accuracy = None if run.final is None else run.final.accuracy
    return {} if accuracy is None else {"error": 1 - accuracy, **run_costs(run)}


def _beats(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return (
        first.keys() >= second.keys()
        and all(first[name] <= second[name] for name in second)
        and any(first[name] < second[name] for name in second)
    )


def pareto_figure(runs: Sequence[GatheredRun], size: tuple[float, float] = WIDE) -> Figure:
    """Draw accuracy over each cost that was measured: runs, their Pareto front and the dense networks."""
    points = {cost: cost_points(runs, cost) for cost in COSTS}
    costs = [cost for cost in COSTS if points[cost].runs]
    across = 2 if len(costs) in (2, 4) else 3
    figure, drawn = panels(size, len(costs), columns=across, sharey=True)
    styles = method_styles([run.method for run in runs])
    for index, (axes, cost) in enumerate(zip(drawn, costs, strict=True)):
        is_first = is_narrow(size) or index % across == 0
        style_axes(axes, COSTS[cost], "test accuracy" if is_first else "")
        _draw(axes, points[cost], styles)
        if cost != "latency":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in drawn:
        percent_axis(axes)
    upper_legend(figure, columns=7)
    return figure


def _draw(axes: Axes, points: CostPoints, styles: Mapping[str, tuple[str, str]]) -> None:
    drawn = (*(point for _, point in points.runs), *points.dense.values(), *points.integers.values())
    limit = 1.05 * max(value for value, _ in drawn)
    # A front of one point is a line, too: all that costs more than it is no better.
    line = [*points.front, (limit, points.front[-1][1])]
    axes.step(
        *zip(*line, strict=True),
        where="post",
        color=PALETTE["muted"],
        linewidth=1.1,
        zorder=1,
        label="Pareto front",
    )
    for method, (role, marker) in styles.items():
        own = [point for run, point in points.runs if run.method == method]
        if own:
            label = method.replace("_", " ")
            axes.plot(*zip(*own, strict=True), marker, color=PALETTE[role], markersize=6, label=label)
    for networks, marker, label in (
        (points.dense, "o", "dense"),
        (points.integers, "s", "dense, 8-bit integers"),
    ):
        if networks:
            axes.plot(
                *zip(*networks.values(), strict=True),
                marker,
                markersize=8,
                markerfacecolor="none",
                markeredgecolor=PALETTE["ink"],
                markeredgewidth=1.4,
                label=label,
            )
    axes.grid(axis="x", color=PALETTE["line"], linewidth=0.8)
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


_NO_MEANS = ("seed", "folder", "best_in")


def mean_rows(runs: Sequence[GatheredRun]) -> list[dict[str, Any]]:
    """Return a row of means for each group of finished runs that differ in the seed alone."""
    finished = [run for run in runs if run.status == "finished"]
    columns = [column for column in (*varied_columns(runs), *COLUMNS) if column.key not in _NO_MEANS]
    groups: dict[str, list[GatheredRun]] = {}
    for run in finished:
        asked = [column.value(run) for column in columns if not column.is_measure]
        groups.setdefault(repr(asked), []).append(run)
    return [_mean_row(group, columns) for group in groups.values()]


def _mean_row(group: Sequence[GatheredRun], columns: Sequence[Column]) -> dict[str, Any]:
    row: dict[str, Any] = {"runs": len(group)}
    for column in columns:
        if not column.is_measure:
            row[column.key] = column.value(group[0])
            continue
        values = [value for run in group if (value := column.value(run)) is not None]
        spread = Spread.of(values) if values else None
        row[column.key] = None if spread is None else spread.mean
        row[f"{column.key}_interval"] = None if spread is None else spread.half_width
    return row


def mean_table(runs: Sequence[GatheredRun]) -> Table:
    """Return the table of means for the page; without rows if no two runs differ in the seed alone."""
    rows = mean_rows(runs)
    columns = [column for column in shown_columns(runs) if column.key not in _NO_MEANS]
    caption = f"Runs that differ in nothing but their seed: {interval_note(row['runs'] for row in rows)}."
    cells = [[*(_mean(column, row) for column in columns), str(row["runs"])] for row in rows]
    words = [index for index, column in enumerate(columns) if column.is_text]
    several = len(rows) < len(runs)
    return Table(caption, [*(column.title for column in columns), "Runs"], cells if several else [], words)


def _mean(column: Column, row: Mapping[str, Any]) -> str:
    mean, half = column.text(row[column.key]), row.get(f"{column.key}_interval")
    return f"{mean} ±\N{NO-BREAK SPACE}{column.text(half).lstrip('+')}" if half else mean


PAGE_FILE = "report.html"
CSV_FILE = "runs.csv"


def write_sweep_report(folder: str | Path) -> Path:
    """Write the page and the CSV file of all runs below a folder into that folder."""
    folder = Path(folder)
    runs = with_fronts(gather_runs(folder))
    write_atomically(folder / CSV_FILE, runs_csv(runs))
    write_atomically(folder / PAGE_FILE, sweep_page(runs, folder, date=date_line()))
    return folder / PAGE_FILE


def load_runs(folder: str | Path, *, average_seeds: bool = False) -> list[dict[str, Any]]:
    """Read the results of all runs below a folder, as rows for `pandas.DataFrame`.

    Args:
        folder: A sweep's folder, or any that holds run folders.
        average_seeds: Whether runs that differ in their seed alone become one row, with the means of their
            numbers, half of each mean's 95 % interval (`accuracy_interval`) and how many they are (`runs`).

    Returns:
        A row for every run: its folder and status, a key for every option in which runs differ, and the
        numbers of `runs.csv`.

    Raises:
        ReportError: The folder holds no run, or is one run itself.
    """
    runs = with_fronts(gather_runs(folder))
    return mean_rows(runs) if average_seeds else run_rows(runs)


def sweep_page(runs: Sequence[GatheredRun], folder: Path, *, date: str = "") -> str:
    """Write the page of many runs as one self-contained HTML document."""
    finished = [run for run in runs if run.status == "finished"]
    titles = {run_title(run.metrics) for run in finished}
    title = titles.pop() if len(titles) == 1 else folder.resolve().name
    counts = Counter(run.status for run in runs)
    states = [f"{counts[status]} {status}" for status in get_args(Status) if counts[status]]
    return render(
        Head(title, [folder.resolve().name, *states, *([date] if date else [])], cards=_headline(finished)),
        {
            "Accuracy and cost": {"figure": _pareto(finished)},
            "Runs": {"table": _table(finished)},
            "Means over seeds": {"table": mean_table(finished)},
            "Warnings": {"table": _warnings(finished)},
            "Failed and unfinished": {"table": _others(runs)},
            "The same in all runs": {"facts": shared_values(finished)},
        },
    )


def _headline(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the most accurate run, and the smallest and fastest that lose at most one percentage point."""
    best = next((run for run in _best_first(runs) if run.final and run.final.accuracy is not None), None)
    if best is None:
        return _best_score(runs)
    return [("Most accurate", format_accuracy(_accuracy(best)), _name(best)), *_least_costs(runs)]


def _least_costs(runs: Sequence[GatheredRun]) -> Iterator[tuple[str, str, str]]:
    for title, cost, better in (
        ("Fewest parameters", "params", "fewer"),
        ("Fewest MACs", "macs", "fewer"),
        ("Least latency", "latency", ""),
        ("Smallest file", "bytes", "smaller"),
    ):
        points = cost_points(runs, cost)
        near = [
            (value / points.dense[dense_network(run)][0], run)
            for run, (value, accuracy) in points.runs
            if dense_network(run) in points.dense and accuracy >= points.dense[dense_network(run)][1] - _NEAR
        ]
        if near:
            kept, run = min(near, key=lambda pair: pair[0])
            change = run.latency_change if cost == "latency" else format_ratio(1 / kept, better, "more")
            yield title, change, f"{_name(run)}, {format_accuracy(_accuracy(run))}; at most 1 point lost"


def _best_score(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the headline of the highest score, if all runs have the same name for it."""
    scores = [(score, run) for run in runs if (score := score_measure(run.metrics)) is not None]
    known = [(score.after, score, run) for score, run in scores if score.after is not None]
    if len({score.title for _, score, _ in known}) != 1:
        return []
    after, score, run = max(known, key=lambda each: each[0])
    return [(f"Highest {score.words}", score.write(after), _name(run))]


def _name(run: GatheredRun) -> str:
    return ", ".join(part for part in (run.method.replace("_", " "), run.budget) if part)


def _pareto(runs: Sequence[GatheredRun]) -> Drawing | None:
    points = {cost: cost_points(runs, cost) for cost in COSTS}
    if not any(found.runs for found in points.values()):
        return None
    caption = (
        "Each point is a run, as it ended. The line joins what nothing else beats in both accuracy and cost, "
        "the dense network and its 8-bit integers included. Accuracy is that on the test set, which "
        "chose nothing."
    )
    if points["latency"].runs:
        caption += (
            " Latency is that of the ONNX file, as a share of the dense network's, timed in turns with it."
        )
    if any(found.integers for found in points.values()):
        caption += (
            " The square is the dense network in 8-bit integers, by the runtime's own means and without any "
            "compression: the first rival."
        )
    return drawing(
        partial(pareto_figure, runs),
        "pareto",
        "Test accuracy over parameters, MACs, latency and bytes of every run. The table below holds them.",
        caption,
    )


def _table(runs: Sequence[GatheredRun]) -> Table:
    columns = [column for column in shown_columns(runs) if column.key != "folder"]  # which the link names
    shown = _best_first(runs)
    return Table(
        "The first column leads to the run's own page. A run is "
        "best in a cost where nothing that costs no more is as accurate, and in all at once where no other "
        "run is better in one measure and no worse in the others.",
        [column.title for column in columns],
        [[_written(column, run) for column in columns] for run in shown],
        [index for index, column in enumerate(columns) if column.is_text],
        [f"{quote(run.folder.as_posix())}/report.html" if run.has_page else None for run in shown],
        is_wide=True,
    )


def _warnings(runs: Sequence[GatheredRun]) -> Table:
    rows = [[str(run.folder), str(text)] for run in runs for text in run.metrics.get("warnings") or ()]
    return Table(
        "What these runs warn of; their numbers may mean little.", ["Folder", "Warning"], rows, (0, 1)
    )


def _others(runs: Sequence[GatheredRun]) -> Table:
    rows = [[str(run.folder), run.status, run.error] for run in runs if run.status != "finished"]
    caption = "The sweep's command, given again with the same hydra.sweep.dir, runs these, no others."
    return Table(caption, ["Folder", "State", "Error"], rows, (0, 1, 2))
