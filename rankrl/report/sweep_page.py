"""Gather the results of many runs: table, CSV file, means over seeds, Pareto fronts, and their page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args
from urllib.parse import quote

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from rankrl.errors import counted
from rankrl.files import write_atomically
from rankrl.report.comparison import Spread, interval_note
from rankrl.report.figures import (
    PALETTE,
    Drawing,
    drawing,
    method_styles,
    panels,
    percent_axis,
    style_axes,
    upper_legend,
)
from rankrl.report.run_folder import BUDGET, GatheredRun, Status, date_line, gather_runs
from rankrl.report.run_tables import (
    UNCHANGED,
    UNKNOWN,
    Card,
    Table,
    csv_text,
    format_accuracy,
    format_bytes,
    format_count,
    format_large,
    format_latency,
    run_title,
)
from rankrl.report.write import render

# Options that have a column of another name in the table.
_HAVE_COLUMNS = (
    *("model.architecture", "dataset.name", "decomposition", "decomposition.format", "selector.name"),
    *("pruner", "pruner.name"),
    *("drop", "minimise", "bytes", "latency", "memory"),  # budgets of a call from Python
)


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    value: Callable[[GatheredRun], Any]
    write: Callable[[float], str] | None = None
    optional: bool = False
    words: Callable[[GatheredRun], str | None] | None = None
    is_measure: bool = False

    def text(self, value: Any) -> str:
        if value in (None, ""):
            return UNKNOWN
        return str(value) if self.write is None else self.write(value).replace("-", "−")

    def cell(self, run: GatheredRun) -> str:
        words = None if self.words is None else self.words(run)
        return words or self.text(self.value(run))


def _accuracy(run: GatheredRun) -> float | None:
    """Return the accuracy of the run's last network, which may be the dense one."""
    known = run.measures.get("accuracy")
    return None if known is None else known.after


def _change(run: GatheredRun) -> float | None:
    before, after = run.before("accuracy"), run.after("accuracy")
    return None if before is None or after is None else 100 * (after - before)


def _measure(key: str, title: str, write: Callable[[float], str]) -> Column:
    return Column(key, title, lambda run: run.after(key), write, is_measure=True)


def _reduction(key: str, title: str, measure: str) -> Column:

    def value(run: GatheredRun) -> float | None:
        return run.measures[measure].ratio if run.after(measure) is not None else None

    def words(run: GatheredRun) -> str | None:
        return UNCHANGED if value(run) and run.measures[measure].change == UNCHANGED else None

    return Column(key, title, value, "{:.2f}×".format, words=words, is_measure=True)


def _write_score(run: GatheredRun) -> str | None:
    score = run.measures.get(SCORE)
    return None if score is None else score.write(score.after)


def _named(key: str, title: str) -> Column:
    return Column(key, title, lambda run: run.named(key), optional=True)


_write_number = "{:g}".format

SCORE = "score"
COLUMNS = (
    Column("method", "Method", lambda run: run.method.replace("_", " ")),
    Column("budget", "Budget", lambda run: run.budget, optional=True),
    _named("model", "Model"),
    _named("dataset", "Dataset"),
    _named("selector", "Selector"),
    _named("task", "Task"),
    Column("seed", "Seed", lambda run: run.metrics.get("seed"), _write_number, optional=True),
    _named("score_name", "Scored by"),
    replace(_measure(SCORE, "Score", _write_number), words=_write_score),
    Column("accuracy", "Test accuracy", _accuracy, format_accuracy, is_measure=True),
    Column("accuracy_change_points", "Change, points", _change, "{:+.2f}".format, is_measure=True),
    _measure("agreement", "Agreement", format_accuracy),
    _measure("params", "Parameters", format_count),
    _reduction("params_ratio", "Fewer parameters", "params"),
    _measure("macs", "MACs", format_large),
    _reduction("macs_ratio", "Fewer MACs", "macs"),
    _measure("latency_ms", "Latency", format_latency),
    _reduction("latency_ratio", "Faster", "latency_ms"),
    _measure("file_bytes", "File", format_bytes),
    Column("best_in", "Best in", lambda run: ", ".join(run.best_in)),
    Column("folder", "Folder", lambda run: str(run.folder)),
)

_DENSE_COLUMNS = ("accuracy", "params", "macs", "latency_ms")


def varied_columns(runs: Sequence[GatheredRun]) -> list[Column]:
    """Return a column for every option in which runs differ and that has no fixed column."""
    names = dict.fromkeys(name for run in runs for name in run.asked)
    fixed = {*_HAVE_COLUMNS, *(column.key for column in COLUMNS)}
    return [
        _varied(name, runs)
        for name in names
        if name not in fixed and len({repr(run.options.get(name)) for run in runs}) > 1
    ]


def _varied(name: str, runs: Sequence[GatheredRun]) -> Column:
    are_words = any(isinstance(run.options.get(name), str | bool) for run in runs)
    return Column(name, name, lambda run: run.options.get(name), None if are_words else _write_number)


def shown_columns(runs: Sequence[GatheredRun]) -> list[Column]:
    """Return the columns with a value in some run, optional and varied ones only if runs differ in them."""
    shown = []
    for column in COLUMNS:
        if column.key == SCORE:
            shown += [each for each in varied_columns(runs) if not each.key.startswith(BUDGET)]
        values = {column.value(run) for run in runs} - {None, ""}
        if values and (len(values) > 1 or not column.optional):
            shown.append(column)
    return shown


def shared_values(runs: Sequence[GatheredRun]) -> dict[str, str]:
    shared = {}
    for column in COLUMNS:
        values = {column.value(run) for run in runs} - {None, ""}
        if column.optional and len(values) == 1:
            shared[column.title] = str(values.pop())
    return shared


def _best_first(runs: Sequence[GatheredRun]) -> list[GatheredRun]:

    def order(run: GatheredRun) -> float:
        known = [value for value in (_accuracy(run), run.after(SCORE)) if value is not None]
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
            **{f"baseline_{name}": run.before(name) for name in _DENSE_COLUMNS},
            "error": run.error,
        }
        for run in runs
    ]


_PRINTED = {
    "accuracy": "Accuracy",
    "accuracy_change_points": "Points",
    "params_ratio": "Params",
    "macs_ratio": "MACs",
    "latency_ratio": "Latency",
}
_MOST_ROWS = 40
_NAME = 28  # characters of a run's name in a line


def results_table(folder: str | Path) -> Table:
    """Tabulate the finished runs below a folder for the terminal, the best first."""
    runs = _best_first([run for run in gather_runs(folder) if run.status == "finished"])
    columns = {column.key: column for column in shown_columns(runs)}
    shown = [columns[key] for key in ("folder", SCORE, *_PRINTED) if key in columns]
    more = f"{counted(len(runs) - _MOST_ROWS, 'more run')}; " if len(runs) > _MOST_ROWS else ""
    rows = [[column.cell(run) for column in shown] for run in runs[:_MOST_ROWS]]
    note = "2.00×: half of the dense network's; " if "params_ratio" in columns else ""
    return Table(
        f"{more}{note}`rankrl task=report runs={folder}` writes the page",
        [_PRINTED.get(column.key, column.title) for column in shown],
        [[_broken(name), *row] for name, *row in rows],
        title=counted(len(runs), "finished run"),
    )


def _broken(name: str) -> str:
    lines = wrap(name.replace("+", "+ "), _NAME, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("+ ", "+")


_NEAR = 0.01  # of accuracy, the loss that a headline accepts

LATENCY = "latency_ms"
COSTS = {
    "params": "parameters",
    "macs": "MACs",
    LATENCY: "latency ÷ dense",
    "file_bytes": "bytes of the file",
}
"""Measures on the horizontal axes of accuracy, and the axes' labels.

Milliseconds of runs that were measured at different times, on a machine that was more or less busy, do not
compare; shares of the dense network's, timed in turns with each run's file, do.
"""

Network = tuple[str, str, float]
Point = tuple[float, float]


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto-optimal points of (cost, accuracy), by rising cost."""
    front: list[Point] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


@dataclass(frozen=True)
class CostPoints:
    runs: list[tuple[GatheredRun, Point]]
    dense: dict[Network, Point]
    integers: dict[Network, Point]

    @property
    def front(self) -> list[Point]:
        points = [point for _, point in self.runs]
        return pareto_front([*points, *self.dense.values(), *self.integers.values()])


def cost_points(runs: Sequence[GatheredRun], cost: str) -> CostPoints:
    """Find the points of the runs whose accuracy and cost were measured, and of their dense networks.

    In integers it has the dense network's parameters and MACs, so that it competes in time and bytes only.
    """
    found = CostPoints([], {}, {})
    for run in runs:
        accuracy, value = run.after("accuracy"), run.after(cost)
        if cost == LATENCY and value is not None:
            value = run.measures[cost].kept
        if accuracy is None or value is None:
            continue
        found.runs.append((run, (value, accuracy)))
        network, scored, costed = dense_network(run), run.measures["accuracy"], run.measures[cost]
        dense, rival = run.before(cost), costed.rival
        if cost == LATENCY and dense:
            dense, rival = 1.0, None if rival is None else rival / dense
        if dense is not None and scored.before is not None:
            found.dense[network] = (dense, scored.before)
        if cost in (LATENCY, "file_bytes") and rival is not None and scored.rival is not None:
            found.integers[network] = (rival, scored.rival)
    return found


def dense_network(run: GatheredRun) -> Network:
    accuracy = run.before("accuracy")
    return run.named("model"), run.named("dataset"), math.nan if accuracy is None else accuracy


def with_fronts(runs: Sequence[GatheredRun]) -> list[GatheredRun]:
    """Add the costs in which each run is Pareto-optimal (`best_in`), also against the dense networks."""
    best: dict[Path, list[str]] = {run.folder: [] for run in runs}
    for cost, name in COSTS.items():
        points = cost_points(runs, cost)
        front = set(points.front)
        for run, point in points.runs:
            if point in front:
                best[run.folder].append(name.partition(" ")[0])
    return [replace(run, best_in=tuple(best[run.folder])) for run in runs]


def pareto_figure(runs: Sequence[GatheredRun]) -> Figure:
    """Draw accuracy over each cost that was measured: runs, their Pareto front and the dense networks."""
    points = {cost: cost_points(runs, cost) for cost in COSTS}
    costs = [cost for cost in COSTS if points[cost].runs]
    across = 2 if len(costs) in (2, 4) else 3
    figure, drawn = panels(len(costs), columns=across, sharey=True)
    styles = method_styles([run.method for run in runs])
    for index, (axes, cost) in enumerate(zip(drawn, costs, strict=True)):
        style_axes(axes, COSTS[cost], "test accuracy" if index % across == 0 else "")
        _draw(axes, points[cost], styles)
        if cost != LATENCY:
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
    muted = PALETTE["muted"]
    axes.step(
        *zip(*line, strict=True), where="post", color=muted, linewidth=1.1, zorder=1, label="Pareto front"
    )
    for method, (role, marker) in styles.items():
        own = [point for run, point in points.runs if run.method == method]
        if own:
            label = method.replace("_", " ")
            axes.plot(*zip(*own, strict=True), marker, color=PALETTE[role], markersize=6, label=label)
    outline: dict[str, Any] = {"markersize": 8, "markerfacecolor": "none", "markeredgecolor": PALETTE["ink"]}
    for networks, marker, label in (
        (points.dense, "o", "dense"),
        (points.integers, "s", "dense, 8-bit integers"),
    ):
        if networks:
            places = zip(*networks.values(), strict=True)
            axes.plot(*places, marker, markeredgewidth=1.4, label=label, **outline)
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
    words = [index for index, column in enumerate(columns) if column.write is None]
    several = len(rows) < len(runs)
    return Table(caption, [*(column.title for column in columns), "Runs"], cells if several else [], words)


def _mean(column: Column, row: Mapping[str, Any]) -> str:
    mean, half = column.text(row[column.key]), row.get(f"{column.key}_interval")
    return f"{mean} ±\N{NO-BREAK SPACE}{column.text(half).lstrip('+')}" if half else mean


def write_sweep_report(folder: str | Path) -> Path:
    """Write the page and the CSV file of all runs below a folder into that folder."""
    folder = Path(folder)
    runs = with_fronts(gather_runs(folder))
    page = folder / "report.html"
    write_atomically(folder / "runs.csv", csv_text(run_rows(runs)))
    write_atomically(page, sweep_page(runs, folder))
    return page


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


def sweep_page(runs: Sequence[GatheredRun], folder: Path) -> str:
    finished = [run for run in runs if run.status == "finished"]
    titles = {run_title(run.metrics) for run in finished}
    title = titles.pop() if len(titles) == 1 else folder.resolve().name
    counts = Counter(run.status for run in runs)
    states = [f"{counts[status]} {status}" for status in get_args(Status) if counts[status]]
    return render(
        title,
        {
            "Accuracy and cost": {"figure": _pareto(finished)},
            "Runs": {"table": _table(finished)},
            "Means over seeds": {"table": mean_table(finished)},
            "Warnings": {"table": _warnings(finished)},
            "Failed and unfinished": {"table": _others(runs)},
            "The same in all runs": {"facts": shared_values(finished)},
        },
        eyebrow=[folder.resolve().name, *states, date_line()],
        cards=_headline(finished),
    )


def _headline(runs: Sequence[GatheredRun]) -> list[Card]:
    """Return the most accurate run, and the smallest and fastest that lose at most one percentage point."""
    best = next((run for run in _best_first(runs) if run.after("accuracy") is not None), None)
    if best is None:
        return _best_score(runs)
    return [Card("Most accurate", format_accuracy(_accuracy(best)), _name(best)), *_least_costs(runs)]


def _least_costs(runs: Sequence[GatheredRun]) -> Iterator[Card]:
    for cost, title in (
        ("params", "Fewest parameters"),
        ("macs", "Fewest MACs"),
        (LATENCY, "Least latency"),
        ("file_bytes", "Smallest file"),
    ):
        points = cost_points(runs, cost)
        near = []
        for run, (value, accuracy) in points.runs:
            dense = points.dense.get(dense_network(run))
            if dense is not None and accuracy >= dense[1] - _NEAR:
                near.append((value / dense[0], run))
        if near:
            _, run = min(near, key=lambda pair: pair[0])
            note = f"{_name(run)}, {format_accuracy(_accuracy(run))}; at most 1 point lost"
            yield Card(title, run.measures[cost].change, note)


def _best_score(runs: Sequence[GatheredRun]) -> list[Card]:
    """Return the headline of the highest score, if all runs have the same name for it."""
    known = [(run.measures[SCORE], run) for run in runs if run.after(SCORE) is not None]
    if len({score.title for score, _ in known}) != 1:
        return []
    score, run = max(known, key=lambda pair: pair[0].after or 0.0)
    return [Card(f"Highest {score.words}", score.write(score.after), _name(run))]


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
    if points[LATENCY].runs:
        caption += (
            " Latency is that of the ONNX file, as a share of the dense network's, timed in turns with it."
        )
    if any(found.integers for found in points.values()):
        caption += (
            " The square is the dense network in 8-bit integers, rounded by the runtime's own means: what "
            "a compressed network has to beat."
        )
    return drawing(
        pareto_figure(runs),
        "pareto",
        "Test accuracy over parameters, MACs, latency and bytes of every run. The table below holds them.",
        caption,
    )


def _table(runs: Sequence[GatheredRun]) -> Table:
    columns = [column for column in shown_columns(runs) if column.key != "folder"]  # which the link names
    shown = _best_first(runs)
    return Table(
        "The first column leads to the run's own page. A run is best in a cost where nothing that costs no "
        "more is as accurate.",
        [column.title for column in columns],
        [[column.cell(run) for column in columns] for run in shown],
        [index for index, column in enumerate(columns) if column.write is None],
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
