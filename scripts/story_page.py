"""The page that `story.py` tells: Markdown, and pictures next to it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from decomposition import LayerSpec
from rankrl.report.axes import percent_axis, plain_numbers, whole_axis
from rankrl.timing import Latency

Curve = tuple[Sequence[float], Sequence[float]]
"""Positions and heights of the points of a line."""

_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#6b7280"
_WIDTH = 8.0  # inches: shown 800 pixels wide, 10 points are as large as a page's own text


class Page:
    """A Markdown page; its pictures lie next to it, as `images/story_NAME.png`.

    Args:
        path: The file that `write` makes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[str] = []

    def add(self, markdown: str) -> None:
        """Add what keeps its lines."""
        self.blocks.append(markdown)

    def tell(self, text: str) -> None:
        """Add a paragraph."""
        self.add(textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False))

    def table(self, header: str, rows: Iterable[Sequence[str]]) -> None:
        """Add a table; `header` names the columns, the first of which holds text and the others numbers."""
        rule = "|---|" + "---:|" * header.count("|")
        self.add("\n".join([f"| {header} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]))

    def picture(self, name: str, figure: Figure, caption: str) -> None:
        """Add a figure, with the legend of its first panel above all panels."""
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
        file = self.path.parent / "images" / f"story_{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
        self.add(f"![{caption}](images/{file.name})")

    def write(self) -> None:
        """Write the page."""
        self.path.write_text("\n\n".join(self.blocks) + "\n", encoding="utf-8")


def shares_figure(layers: Sequence[LayerSpec], params: int, macs: int) -> Figure:
    """Draw the share that every layer has of a network's parameters and MACs."""
    figure, (axes,) = _panels(1, "", "share of the network", height=3.6)
    places = range(len(layers))
    left, right = ([place + shift for place in places] for shift in (-0.2, 0.2))
    axes.bar(left, [layer.params / params for layer in layers], 0.4, color=_BLUE, label="parameters")
    axes.bar(right, [layer.macs / macs for layer in layers], 0.4, color=_ORANGE, label="MACs")
    axes.set_xticks(places, [layer.name for layer in layers], rotation=90)
    percent_axis(axes, low=0.0)
    return figure


def kept_figure(panels: Mapping[str, Mapping[str, Curve]], y: str, *, dense: float | None = None) -> Figure:
    """Draw curves over the kept share of the parameters, in panels side by side.

    Args:
        panels: The curves by label, by the title of their panel.
        y: Label of the y axis.
        dense: What the dense network has, if it is to be shown; heights are percentages then.
    """
    figure, all_axes = _panels(len(panels), "parameters kept", y, height=3.0)
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for (label, curve), colour in zip(curves.items(), (_ORANGE, _BLUE, _GREEN), strict=False):
            axes.plot(*curve, ".-", color=colour, label=label)
        if dense is not None:
            axes.axhline(dense, color=_GREY, linestyle="--", label="dense")
        axes.set_title(title, fontsize=10)
    for axes in all_axes:
        percent_axis(axes, which="x", bins=3 if len(panels) > 2 else 6, low=0.0)
    if dense is None:
        all_axes[0].set_ylim(bottom=0)
        plain_numbers(all_axes[0].yaxis)
    else:
        percent_axis(all_axes[0], low=0.0)
    return figure


def search_figure(rewards: Sequence[float], others: Mapping[str, float]) -> Figure:
    """Draw the agent's rewards, the best so far, and the best of other selectors as lines."""
    figure, (axes,) = _panels(1, "episode", "reward (held-out accuracy)")
    episodes = range(1, len(rewards) + 1)
    axes.plot(episodes, rewards, ".", color=_BLUE, alpha=0.5, label="agent")
    axes.step(episodes, [*accumulate(rewards, max)], where="post", color=_BLUE, label="agent, best so far")
    for (label, reward), colour in zip(others.items(), (_ORANGE, _GREY), strict=True):
        axes.axhline(reward, color=colour, linestyle="--", label=label, zorder=1)
    whole_axis(axes)
    percent_axis(axes)
    return figure


def epochs_figure(accuracies: Sequence[float], dense: float) -> Figure:
    """Draw the held-out accuracies before and after each epoch and the dense network's."""
    figure, (axes,) = _panels(1, "epoch", "held-out accuracy", height=2.6)
    axes.plot(range(len(accuracies)), accuracies, ".-", color=_BLUE, label="decomposed")
    axes.axhline(dense, color=_GREY, linestyle="--", label="dense")
    whole_axis(axes)
    percent_axis(axes)
    return figure


def latency_figure(latencies: Mapping[str, Latency]) -> Figure:
    """Draw medians as bars, with a line from the 10th to the 90th percentile."""
    batch = next(iter(latencies.values())).batch
    figure, (axes,) = _panels(1, f"ms for {batch} images", "", height=0.8 + 0.32 * len(latencies))
    for name, each in latencies.items():
        spread = [[each.median_ms - each.low_ms], [each.high_ms - each.median_ms]]
        axes.barh(name, each.median_ms, 0.6, xerr=spread, color=_BLUE, alpha=0.7, capsize=3)
    axes.invert_yaxis()
    axes.grid(visible=False)
    return figure


def _panels(columns: int, x: str, y: str, *, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels side by side, which share their axes."""
    figure = Figure(figsize=(_WIDTH, height), layout=ConstrainedLayoutEngine(wspace=0.04))
    panels = list(figure.subplots(1, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="0.9")
        axes.set_xlabel(x)
    panels[0].set_ylabel(y)
    return figure, panels
