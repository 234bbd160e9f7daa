"""Write the page of many runs: Pareto fronts, table of runs, means over seeds, failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rankrl.files import write_atomically
from rankrl.report.comparison import Spread, interval_note
from rankrl.report.figures import FONT, NARROW, PALETTE, method_styles, percent_axis, style_axes, upper_legend
from rankrl.report.html_page import Drawing, Head, Table, drawing, render, text_table
from rankrl.report.run_folder import GatheredRun, Status, date_line, gather_runs
from rankrl.report.run_tables import UNKNOWN, Stage, format_accuracy, number, ratio, score_quality
from rankrl.report.sweep_table import (
    COLUMNS,
    Column,
    run_rows,
    runs_csv,
    shared_values,
    shown_columns,
    table_rows,
    varied_columns,
    written,
)
from rankrl.report.write import run_title

COSTS = {"params": "parameters", "macs": "MACs", "latency": "latency ÷ dense", "bytes": "bytes of the file"}
"""Measures on the horizontal axes of accuracy, and the axes' labels.

Milliseconds of runs that were measured at different times, on a machine that was more or less busy, do not
compare; shares of the dense network's, timed in turns with each run's file, do.
"""

ALL_AT_ONCE = "all at once"
"""The measure in which a run is best that no other run beats in all measures."""

Network = tuple[str, str, float]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto-optimal points (cost, accuracy), by rising cost.

    A point is dominated by one that costs no more, is no less accurate, and is better in one of the two.
    """
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


def plotted(runs: Sequence[GatheredRun], cost: str) -> list[tuple[GatheredRun, float, float]]:
    """Return the runs whose accuracy and cost were measured, with both."""
    points = []
    for run in runs:
        final = run.final
        value = None if final is None else _cost(run, final, cost)
        if final is not None and final.accuracy is not None and value is not None:
            points.append((run, value, final.accuracy))
    return points


def rivals(runs: Sequence[GatheredRun], cost: str) -> dict[Network, tuple[float, float]]:
    """Return cost and accuracy of each dense network in 8-bit integers.

    Its parameters and MACs are those of the dense network, so that it competes in time and bytes only.
    """
    costs: dict[Network, tuple[float, float]] = {}
    for run in runs:
        accuracy, faster, size = (
            number(run.metrics, "dense_int8", key) for key in ("accuracy", "latency_ratio", "file_bytes")
        )
        value = {"latency": 1 / faster if faster else None, "bytes": size}.get(cost)
        if accuracy is not None and value is not None:
            costs[dense_network(run)] = (value, accuracy)
    return costs


def with_fronts(runs: Sequence[GatheredRun]) -> list[GatheredRun]:
    """Return the runs with the measures in which each is Pareto-optimal (`GatheredRun.best_in`).

    They are the costs in which it is on the front (dense networks in floating point and in 8-bit integers
    compete, too), and `all at once` if no other run dominates it in accuracy and all measured costs.
    """
    best: dict[Path, list[str]] = {run.folder: [] for run in runs}
    for cost, name in COSTS.items():
        front = set(_front(runs, cost))
        for run, value, accuracy in plotted(runs, cost):
            if (value, accuracy) in front:
                best[run.folder].append(name.partition(" ")[0])
    measured = [(run, _all_costs(run)) for run in runs]
    for run, mine in measured:
        if len(mine) > 2 and not any(_beats(others, mine) for _, others in measured):
            best[run.folder].append(ALL_AT_ONCE)
    return [replace(run, best_in=tuple(best[run.folder])) for run in runs]


def _front(runs: Sequence[GatheredRun], cost: str) -> list[tuple[float, float]]:
    """Return the Pareto front of runs and dense networks, in floating point and in integers."""
    points = [(value, accuracy) for _, value, accuracy in plotted(runs, cost)]
    return pareto_front([*points, *dense_costs(runs, cost).values(), *rivals(runs, cost).values()])


def _all_costs(run: GatheredRun) -> dict[str, float]:
    """Return a run's costs and its error (1 - accuracy), all of them to be minimised."""
    costs = {cost: value for cost in COSTS for _, value, _ in plotted([run], cost)}
    accuracy = None if run.final is None else run.final.accuracy
    return {} if accuracy is None else {"error": 1 - accuracy, **costs}


def _beats(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    shared = first.keys() & second.keys()
    return (
        shared >= second.keys()
        and all(first[name] <= second[name] for name in shared)
        and any(first[name] < second[name] for name in shared)
    )


def _cost(run: GatheredRun, stage: Stage, cost: str) -> float | None:
    if cost == "bytes":
        return number(run.metrics, "onnx", "baseline_file_bytes" if stage is run.baseline else "file_bytes")
    if cost != "latency":
        value: float | None = getattr(stage, cost)
        return value
    if stage is run.baseline:
        return None if stage.latency_ms is None else 1.0
    dense = None if run.baseline is None else run.baseline.latency_ms
    faster = ratio(run.metrics, "latency", dense, stage.latency_ms)
    return 1 / faster if faster else None


def pareto_figure(runs: Sequence[GatheredRun], *, narrow: bool) -> Figure:
    """Draw accuracy over each cost that was measured: runs, their Pareto front and the dense networks."""
    costs = [cost for cost in COSTS if plotted(runs, cost)]
    count = len(costs)
    columns = 1 if narrow else 2 if count == 4 else count
    rows = math.ceil(count / columns)
    width = NARROW[0] if narrow else 9.4
    height = 0.4 + (2.6 if narrow else 3.2) * rows
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    styles = method_styles([run.method for run in runs])
    for index, (axes, cost) in enumerate(zip(panels.flat, costs, strict=True)):
        _draw(axes, runs, cost, styles, labelled=index % columns == 0)
    for axes in panels.flat:
        percent_axis(axes)
    upper_legend(figure, columns=3 if narrow else 7)
    return figure


def _draw(
    axes: Axes,
    runs: Sequence[GatheredRun],
    cost: str,
    styles: Mapping[str, tuple[str, str]],
    *,
    labelled: bool,
) -> None:
    style_axes(axes, COSTS[cost], "test accuracy" if labelled else "")
    axes.grid(axis="x", color=PALETTE["line"], linewidth=0.8)
    points = plotted(runs, cost)
    front = _front(runs, cost)
    axes.step(*zip(*front, strict=True), where="post", color=PALETTE["muted"], linewidth=1.1, zorder=1)
    for method, (role, marker) in styles.items():
        own = [(value, accuracy) for run, value, accuracy in points if run.method == method]
        if own:
            axes.plot(
                *zip(*own, strict=True),
                marker,
                color=PALETTE[role],
                markersize=6,
                label=method.replace("_", " "),
            )
    dense, integers = dense_costs(runs, cost), rivals(runs, cost)
    for points_of, marker, size, label in (
        (dense, "o", 8, "dense"),
        (integers, "s", 7, "dense, 8-bit integers"),
    ):
        if points_of:
            axes.plot(
                *zip(*points_of.values(), strict=True),
                marker,
                markersize=size,
                markerfacecolor="none",
                markeredgecolor=PALETTE["ink"],
                markeredgewidth=1.4,
                label=label,
            )
    axes.plot([], [], color=PALETTE["muted"], linewidth=1.1, label="Pareto front")
    networks = (*dense.values(), *integers.values())
    axes.set_xlim(0, 1.05 * max([*(value for _, value, _ in points), *(value for value, _ in networks)]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.tick_params(labelsize=FONT)


def dense_costs(runs: Sequence[GatheredRun], cost: str) -> dict[Network, tuple[float, float]]:
    """Return cost and accuracy of each dense network."""
    networks: dict[Network, float] = {}
    for run, _, _ in plotted(runs, cost):
        dense = run.baseline
        value = None if dense is None else _cost(run, dense, cost)
        if dense is not None and dense.accuracy is not None and value is not None:
            networks[dense_network(run)] = value
    return {network: (value, network[2]) for network, value in networks.items()}


def dense_network(run: GatheredRun) -> Network:
    """Return the identity of a run's dense network: model, dataset and accuracy."""
    accuracy = None if run.baseline is None else run.baseline.accuracy
    return run.named("model"), run.named("dataset"), math.nan if accuracy is None else accuracy


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


_CAPTION = "Runs that differ in nothing but their seed"
_NO_MEANS = ("seed", "folder", "best_in")


def mean_rows(runs: Sequence[GatheredRun]) -> list[dict[str, Any]]:
    """Return a row of means for each group of finished runs that differ in the seed alone."""
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
    """Return the table of means for the page; None if no two runs differ in the seed alone."""
    groups = seed_groups(runs)
    if len(groups) == len(runs):
        return None
    columns = [column for column in shown_columns(runs) if column.key not in _NO_MEANS]
    cells = [[*(_cell(group, column) for column in columns), str(len(group))] for group in groups]
    words = [index for index, column in enumerate(columns) if column.is_text]
    caption = f"{_CAPTION}: {interval_note(map(len, groups))}."
    return text_table(caption, [*(column.title for column in columns), "Runs"], cells, text_columns=words)


def seed_groups(runs: Sequence[GatheredRun]) -> list[list[GatheredRun]]:
    """Group the finished runs that differ in the seed alone."""
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
        "sweep",
        Head(title, [folder.resolve().name, *states, *([date] if date else [])], cards=_headline(runs)),
        pareto=_pareto(finished),
        runs=_table(finished),
        means=mean_table(finished),
        warnings=_warnings(finished),
        others=_others(runs),
        shared=shared_values(finished),
    )


def _headline(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the most accurate run, and the smallest and fastest that lose at most one percentage point."""
    values = []
    measured = [run for run in runs if run.final is not None and run.final.accuracy is not None]
    if measured:
        best = max(measured, key=_accuracy)
        values.append(("Most accurate", format_accuracy(_accuracy(best)), _name(best)))
    else:
        values += _best_score(runs)
    for title, cost in (
        ("Fewest parameters", "params"),
        ("Fewest MACs", "macs"),
        ("Least latency", "latency"),
        ("Smallest file", "bytes"),
    ):
        dense = dense_costs(measured, cost)
        near = [
            (value / dense[dense_network(run)][0], run)
            for run, value, accuracy in plotted(measured, cost)
            if dense_network(run) in dense and accuracy >= dense[dense_network(run)][1] - 0.01
        ]
        if near:
            kept, run = min(near, key=lambda pair: pair[0])
            note = f"{_name(run)}, {format_accuracy(_accuracy(run))}; at most 1 point lost"
            change = (
                run.latency_change
                if cost == "latency"
                else f"{1 / kept:.2f}× {'smaller' if cost == 'bytes' else 'fewer'}"
            )
            values.append((title, change, note))
    return values


def _best_score(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the headline of the highest score, if all runs have the same name for it."""
    scores = [(quality, run) for run in runs if (quality := score_quality(run.metrics)) is not None]
    known = [(quality.after, quality, run) for quality, run in scores if quality.after is not None]
    if len({quality.title for _, quality, _ in known}) != 1:
        return []
    after, quality, run = max(known, key=lambda each: each[0])
    return [(f"Highest {quality.words}", quality.write(after), _name(run))]


def _accuracy(run: GatheredRun) -> float:
    accuracy = None if run.final is None else run.final.accuracy
    return -1.0 if accuracy is None else accuracy


def _name(run: GatheredRun) -> str:
    return ", ".join(part for part in (run.method.replace("_", " "), run.budget) if part)


def _pareto(runs: Sequence[GatheredRun]) -> Drawing | None:
    if not any(plotted(runs, cost) for cost in COSTS):
        return None
    caption = (
        "Each point is a run, as it ended. The line joins what nothing else beats in both accuracy and cost, "
        "the dense network and its 8-bit integers included. Accuracy is that on the test set, which "
        "chose nothing."
    )
    if plotted(runs, "latency"):
        caption += (
            " Latency is that of the ONNX file, as a share of the dense network's, timed in turns with it."
        )
    if any(rivals(runs, cost) for cost in COSTS):
        caption += (
            " The square is the dense network in 8-bit integers, by the runtime's own means and without any "
            "compression: the first rival."
        )
    return drawing(
        lambda size: pareto_figure(runs, narrow=size == NARROW),
        "pareto",
        "Test accuracy over parameters, MACs, latency and bytes of every run. The table below holds them.",
        caption,
    )


def _table(runs: Sequence[GatheredRun]) -> Table | None:
    if not runs:
        return None
    columns = shown_columns(runs)
    return Table(
        "The first column leads to the run's own page. A run is "
        "best in a cost where nothing that costs no more is as accurate, and in all at once where no other "
        "run is better in one measure and no worse in the others.",
        [column.title for column in columns],
        table_rows(runs, columns),
        [index for index, column in enumerate(columns) if column.is_text],
    )


def _warnings(runs: Sequence[GatheredRun]) -> Table | None:
    rows = [[str(run.folder), str(text)] for run in runs for text in run.metrics.get("warnings") or ()]
    caption = "What these runs warn of; their numbers may mean little."
    return text_table(caption, ["Folder", "Warning"], rows, text_columns=(0, 1))


def _others(runs: Sequence[GatheredRun]) -> Table | None:
    rows = [[str(run.folder), run.status, run.error] for run in runs if run.status != "finished"]
    caption = "The sweep's command, given again with the same hydra.sweep.dir, runs these, no others."
    return text_table(caption, ["Folder", "State", "Error"], rows, text_columns=(0, 1, 2))
