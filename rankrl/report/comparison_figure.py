"""The plots of a comparison of selectors. Each has a second panel that looks closer at the better half."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankrl.report.axes import number_axis, percent_axis, whole_axis
from rankrl.report.comparison import ComparisonRow, summarise
from rankrl.report.figures import NARROW, PALETTE, WIDE, style_axes, upper_legend

_COLOURS = tuple(colour for name, colour in PALETTE.items() if name.startswith("series-"))
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)))
_ONE_PLAN = (0, (2, 2))
_FEWEST_FOR_CLOSER_LOOK = 4


def rewards_figure(rows: Sequence[ComparisonRow], size: tuple[float, float] = WIDE) -> Figure:
    """Draw the best reward so far over the episodes: the mean of each selector's searches and their range."""
    figure, panels = _panels(rows, size)
    leaders = _leaders(rows)
    for axes in panels:
        style_axes(axes, "episode", "best reward so far")
        _draw_rewards(axes, rows)
        number_axis(axes)
        whole_axis(axes, bins=6)
    # A search's first plans may be poor and flatten the rest.
    _look_closer(panels, [row.best_rewards[len(row.best_rewards) // 4] for row in leaders], leaders)
    upper_legend(figure, columns=8 if size[0] > NARROW[0] else 3)
    return figure


def accuracies_figure(
    rows: Sequence[ComparisonRow], baseline: float | None = None, size: tuple[float, float] = WIDE
) -> Figure:
    """Draw the test accuracy of every search's plan, before and after fine-tuning."""
    figure, panels = _panels(rows, size)
    for axes, shown in zip(panels, (rows, _leaders(rows)), strict=False):
        style_axes(axes, "", "test accuracy")
        _draw_accuracies(axes, shown)
        if baseline is not None:
            axes.axhline(
                baseline, color=PALETTE["muted"], linewidth=1.1, linestyle=(0, (5, 3)), label="dense"
            )
        percent_axis(axes)
    upper_legend(figure, columns=3)
    return figure


def _panels(rows: Sequence[ComparisonRow], size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    closer = len(summarise(rows)) >= _FEWEST_FOR_CLOSER_LOOK
    side_by_side = size[0] > NARROW[0]
    height = size[1] if side_by_side or not closer else 1.7 * size[1]
    figure = Figure(figsize=(size[0], height), layout="constrained")
    shape = (1, 1) if not closer else (1, 2) if side_by_side else (2, 1)
    return figure, list(figure.subplots(*shape, squeeze=False).flat)


def _leaders(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the searches of the better half of the selectors, by mean reward."""
    summaries = summarise(rows)
    names = [summary.selector for summary in summaries[: (len(summaries) + 1) // 2]]
    return [row for row in rows if row.selector in names]


def _draw_rewards(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    longest = max(len(row.best_rewards) for row in rows)
    episodes = np.arange(1, longest + 1)
    for index, summary in enumerate(summarise(rows)):
        runs = [row.best_rewards for row in rows if row.selector == summary.selector]
        # A search that ended early keeps what it had.
        curves = np.array([[*run, *[run[-1]] * (longest - len(run))] for run in runs])
        one_plan = longest > 1 and all(len(run) == 1 for run in runs)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(
            episodes,
            curves.mean(0),
            color=colour,
            linestyle=_ONE_PLAN if one_plan else _DASHES[index // len(_COLOURS) % len(_DASHES)],
            marker="." if longest == 1 else None,
            linewidth=1.1 if one_plan else 1.6,
            label=summary.selector,
        )
        if len(curves) > 1:
            axes.fill_between(episodes, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)


def _draw_accuracies(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    names = [summary.selector for summary in summarise(rows)]
    for label, attribute, colour, offset in (
        ("before fine-tuning", "test_accuracy", "second", -0.12),
        ("after fine-tuning", "finetuned_accuracy", "accent", 0.12),
    ):
        values = [(names.index(row.selector) + offset, getattr(row, attribute)) for row in rows]
        points = [point for point in values if point[1] is not None]
        if points:
            axes.plot(
                *zip(*points, strict=True), "o", color=PALETTE[colour], markersize=5, alpha=0.8, label=label
            )
    labels = [re.sub("(?<=[:,])", "\n", name) for name in names]  # long ones would leave the dots no room
    axes.set_xticks(range(len(names)), labels, rotation=60 if len(names) > 4 else 0)
    axes.set_xlim(-0.6, len(names) - 0.4)


def _look_closer(panels: Sequence[Axes], starts: Sequence[float], leaders: Sequence[ComparisonRow]) -> None:
    """Set the second panel's range to what the better half reached."""
    if len(panels) < 2:
        return
    ends = [row.best_reward for row in leaders]
    low, high = min(*starts, *ends), max(ends)
    margin = 0.06 * (high - low) or 0.01
    panels[1].set_ylim(low - margin, high + margin)
