"""The Pareto front of accuracy and cost, and its plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rankrl.report.axes import percent_axis
from rankrl.report.figures import FONT, NARROW, PALETTE, method_styles, style_axes, upper_legend
from rankrl.report.gather import GatheredRun
from rankrl.report.stages import Stage, number, ratio

COSTS = {"params": "parameters", "macs": "MACs", "latency": "latency ÷ dense", "bytes": "bytes of the file"}
"""What accuracy is shown over, and the labels of the axes.

Milliseconds of runs that were measured at different times, on a machine that was more or less busy, do not
compare; shares of the dense network's, timed in turns with each run's file, do.
"""

ALL_AT_ONCE = "all at once"
"""What a run is best in that nothing beats in all measures together."""

Network = tuple[str, str, float]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, accuracy) that no other one beats, by rising cost.

    A point is beaten by one that costs no more and is no less accurate, and is better in one of the two.
    """
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


def plotted(runs: Sequence[GatheredRun], cost: str) -> list[tuple[GatheredRun, float, float]]:
    """Return the runs that have an accuracy and this cost, with both."""
    points = []
    for run in runs:
        final = run.final
        value = None if final is None else _cost(run, final, cost)
        if final is not None and final.accuracy is not None and value is not None:
            points.append((run, value, final.accuracy))
    return points


def rivals(runs: Sequence[GatheredRun], cost: str) -> dict[Network, tuple[float, float]]:
    """Return cost and accuracy of each dense network in 8-bit integers, which needs no compression.

    Its parameters and MACs are those of the dense network, so that it is a rival in time and in bytes alone.
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
    """Return the runs with what each is best in (`GatheredRun.best_in`).

    That is every cost in which nothing is as accurate and cheaper, dense networks in floating point and in
    8-bit integers included, and `all at once` where no other run is as accurate and costs no more in all that
    was measured, and is better in one.
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
    """Return the front of runs and dense networks, in floating point and in integers."""
    points = [(value, accuracy) for _, value, accuracy in plotted(runs, cost)]
    return pareto_front([*points, *dense_costs(runs, cost).values(), *rivals(runs, cost).values()])


def _all_costs(run: GatheredRun) -> dict[str, float]:
    """Return a run's costs and its error, which all are better when they are less."""
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
    """Return what tells a run's dense network from others: model, dataset and accuracy."""
    accuracy = None if run.baseline is None else run.baseline.accuracy
    return run.named("model"), run.named("dataset"), math.nan if accuracy is None else accuracy


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
