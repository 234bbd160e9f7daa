"""Draw the figures of a run, the plan along the network, and figures as SVG within a page."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from decomposition import list_formats
from rankrl.plan_search.scores.evaluation import EpisodeRow
from rankrl.report.run_folder import DETERMINISTIC_PHASE, PRESET_PHASE, WARM_UP_PHASE, LayerRow, layer_formats

_MARGIN = 0.05  # of the range, on either side
_ALONE = 0.01  # where all values are equal, so that the axis has a length
_STEPS = (1, 2, 2.5, 5, 10)


def percent_axis(axes: Axes, *, which: str = "y", bins: int = 6, low: float | None = None) -> None:
    """Format an axis of fractions, after everything is drawn on it and on axes that share it.

    Its limits leave a margin within 0 to 100 %; a single value is in the middle, between two ticks. Markers
    on a limit are not clipped.
    """
    least, most = _drawn(axes, which)
    margin = _MARGIN * (most - least) or _ALONE
    end = most + margin if most > 1 else min(1.0, most + margin)
    axes.set(**{f"{which}lim": (max(0.0, least - margin) if low is None else low, end)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=bins, steps=_STEPS))
    axis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    for artist in axes.lines:
        artist.set_clip_on(False)


def number_axis(axes: Axes) -> None:
    """Format a vertical axis of plain numbers: labels in full, a single value centred."""
    least, most = _drawn(axes, "y")
    margin = _MARGIN * (most - least) or _MARGIN * abs(most) or _ALONE
    axes.set_ylim(least - margin, most + margin)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=_STEPS))
    axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))


def whole_axis(axes: Axes, *, which: str = "x", bins: int = 8) -> None:
    """Format an axis of counts: whole numbers only, a single one in the middle."""
    least, most = _drawn(axes, which)
    if most - least < 1:
        axes.set(**{f"{which}lim": (least - 0.5, most + 0.5)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(integer=True, nbins=bins, steps=(1, 2, 5, 10), min_n_ticks=1))


def _drawn(axes: Axes, which: str) -> tuple[float, float]:
    shared = (axes.get_shared_x_axes() if which == "x" else axes.get_shared_y_axes()).get_siblings(axes)
    spans = [getattr(panel.dataLim, f"interval{which}") for panel in shared]
    values = [float(value) for span in spans for value in span if math.isfinite(value)]
    return (min(values), max(values)) if values else (0.0, 1.0)


PALETTE = {
    "ink": "#1b2430",
    "muted": "#5f6b7a",
    "line": "#dfe3e8",
    "soft": "#a9bdf0",
    "accent": "#2457d6",
    "second": "#c8610a",
    "shade": "#eef1f5",
    "series-1": "#2456d5",
    "series-2": "#0d8a72",
    "series-3": "#c9600b",
    "series-4": "#9b3fb5",
    "series-5": "#b3261e",
    "series-6": "#7a6a00",
    "series-7": "#4f8a10",
}
"""Colours by role; the page defines a CSS variable of the same name for each."""

SERIES = tuple(role for role in PALETTE if role.startswith("series-"))
"""Roles of the colours of formats and selectors, in order."""

WIDTH, HEIGHT = 9.4, 3.5
"""Size in inches of a figure of one row, on a page or in a file."""

FONT = 8.5
"""Size of all text in a figure, in points."""

_PANEL = 0.85  # height of one of several rows of panels, relative to a figure with one
_FEWEST_AVERAGED = 5  # episodes in the moving average, at least
_AVERAGED_FRACTION = 20
_MARKERS = ("o", "s", "^", "D", "v", "P", "p", "X")


def panels(count: int, *, columns: int = 2, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    across = min(columns, count)
    rows = math.ceil(count / across)
    height = HEIGHT if rows == 1 else _PANEL * rows * HEIGHT
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, across, sharey=sharey, squeeze=False).flat)


def method_styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return (role of the colour, marker) of every method; a tensor format has the same on every page."""
    formats = list_formats()
    names = [*formats, *sorted(set(methods) - set(formats))]
    return {
        name: (SERIES[index % len(SERIES)], _MARKERS[index % len(_MARKERS)])
        for index, name in enumerate(names)
        if name in methods
    }


def reward_figure(episodes: Sequence[EpisodeRow]) -> Figure:
    """Draw the search: every episode's reward, the moving average, the best so far, the reference plans."""
    figure, (axes,) = panels(1)
    style_axes(axes, "episode", "reward")
    searched = [row for row in episodes if row.phase != PRESET_PHASE]
    if searched:
        _draw_search(axes, searched)
        best = [row.best_reward for row in episodes]
        numbers = [row.episode for row in episodes]
        axes.step(numbers, best, where="post", color=PALETTE["second"], linewidth=1.6, label="best so far")
    for row in episodes:
        if row.phase == PRESET_PHASE:
            axes.axhline(
                row.reward,
                color=PALETTE["muted"],
                linewidth=1.1,
                linestyle=(0, (5, 3)),
                label="greedy's plan",
            )
            axes.plot(row.episode, row.reward, ".", color=PALETTE["muted"], markersize=5)
    number_axis(axes)
    whole_axis(axes)
    upper_legend(figure, columns=6)
    return figure


def _draw_search(axes: Axes, searched: Sequence[EpisodeRow]) -> None:
    numbers = np.array([row.episode for row in searched])
    rewards = np.array([row.reward for row in searched])
    axes.plot(numbers, rewards, ".", color=PALETTE["soft"], markersize=5, label="episode")
    window = max(_FEWEST_AVERAGED, len(rewards) // _AVERAGED_FRACTION)
    of_policy = [row for row in searched if row.phase == DETERMINISTIC_PHASE]
    if of_policy:
        points = [row.episode for row in of_policy], [row.reward for row in of_policy]
        axes.plot(*points, "o-", color=PALETTE["accent"], markersize=4, label="policy without noise")
    elif len(rewards) > window:
        average = np.convolve(rewards, np.full(window, 1 / window), mode="valid")
        label = f"mean of {window}"
        axes.plot(numbers[window - 1 :], average, color=PALETTE["accent"], linewidth=1.6, label=label)
    warm_up = [row.episode for row in searched if row.phase == WARM_UP_PHASE]
    if warm_up:
        ends = min(warm_up) - 0.5, max(warm_up) + 0.5
        axes.axvspan(*ends, color=PALETTE["shade"], zorder=0, label="warm-up")


LEFT_DENSE = "left dense"
ONLY_ROUNDED = "dense, in integers"
REMOVED = "removed"
_COMPRESSED = "compressed"


def layers_figure(layers: Sequence[LayerRow]) -> Figure:
    """Draw the plan: the share of its parameters that each layer keeps, coloured by format, and its ranks."""
    ranked = any(row.ranks for row in layers)
    figure = Figure(figsize=(WIDTH, HEIGHT * (1.55 if ranked else 1.15)), layout="constrained")
    ratios = (3, 2) if ranked else None
    drawn = figure.subplots(2 if ranked else 1, sharex=True, height_ratios=ratios, squeeze=False)
    shares, ranks = drawn[0, 0], drawn[-1, 0]
    style_axes(shares, "", "parameters kept")
    kinds, colours = layer_kinds(layers)
    for name, colour in colours.items():
        indices = [index for index, kind in enumerate(kinds) if kind == name]
        heights = [layers[index].kept for index in indices]
        shares.bar(indices, heights, width=0.72, color=PALETTE[colour], label=name.replace("_", " "))
    total = sum(row.params_after for row in layers) / sum(row.params_before for row in layers)
    shares.axhline(
        total, color=PALETTE["second"], linewidth=1.2, linestyle=(0, (4, 3)), label="all layers together"
    )
    percent_axis(shares, low=0.0)
    if ranked:
        _draw_ranks(ranks, layers)
    step = max(1, math.ceil(len(layers) / (WIDTH * 4.2)))
    ranks.set_xticks(range(0, len(layers), step), [row.name for row in layers[::step]], rotation=90)
    ranks.set_xlim(-0.7, len(layers) - 0.3)
    upper_legend(figure, columns=len(colours) + 1)
    return figure


def layer_kinds(layers: Sequence[LayerRow]) -> tuple[list[str], dict[str, str]]:
    """Return the legend's entry of every layer, its format if there are several; and the entries' colours."""
    formats = layer_formats(layers)
    mixed = len(formats) > 1
    kinds = [_layer_kind(row, mixed=mixed) for row in layers]
    roles = {name: role for name, (role, _) in method_styles(formats).items()} if mixed else {}
    roles |= {_COMPRESSED: "accent", ONLY_ROUNDED: "muted", LEFT_DENSE: "soft"}
    return kinds, {name: role for name, role in roles.items() if name in kinds}


def _layer_kind(row: LayerRow, *, mixed: bool) -> str:
    if row.params_after == 0:
        return REMOVED
    if not row.is_compressed:
        return LEFT_DENSE
    if row.precision and not row.ranks and row.params_after == row.params_before:
        return ONLY_ROUNDED
    return row.format if mixed and row.format else _COMPRESSED


def _draw_ranks(axes: Axes, layers: Sequence[LayerRow]) -> None:
    """Draw a dot for each of a layer's ranks, joined from the least to the largest."""
    style_axes(axes, "", "rank")
    points = [(index, rank) for index, row in enumerate(layers) for rank in sorted(set(row.ranks))]
    spans = [(index, min(row.ranks), max(row.ranks)) for index, row in enumerate(layers) if row.ranks]
    axes.vlines(*zip(*spans, strict=True), color=PALETTE["soft"], linewidth=2.4)
    axes.plot(*zip(*points, strict=True), "o", color=PALETTE["accent"], markersize=3.4)
    whole_axis(axes, which="y", bins=5)
    axes.set_ylim(bottom=0)


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Give a panel a light grid, no box and one font size."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(PALETTE["muted"])
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=PALETTE["line"], linewidth=0.8)
    axes.tick_params(colors=PALETTE["muted"], labelsize=FONT, length=0)
    axes.set_xlabel(x_label, color=PALETTE["muted"], fontsize=FONT)
    axes.set_ylabel(y_label, color=PALETTE["muted"], fontsize=FONT)
    axes.patch.set_visible(False)


def upper_legend(figure: Figure, *, columns: int) -> None:
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=FONT,
        labelcolor=PALETTE["ink"],
        handlelength=1.6,
        columnspacing=1.4,
    )


_LEAST = 6.0  # percent, so that the smallest layers are seen


@dataclass(frozen=True)
class Block:
    """A layer: the outline shows its original size in percent of the largest, the filling what is left."""

    height: float
    filled: float
    role: str
    title: str


@dataclass(frozen=True)
class PlanDrawing:
    blocks: Sequence[Block]
    legend: Sequence[tuple[str, str]]
    caption: str


def plan_drawing(layers: Sequence[LayerRow], titles: Sequence[str]) -> PlanDrawing | None:
    """Draw the layers in forward order, with titles to point at; None without layers.

    The height of an outline grows with the fourth root of the layer's parameters, so that the smallest are
    seen next to the largest.
    """
    if not layers:
        return None
    kinds, colours = layer_kinds(layers)
    largest = max(row.params_before for row in layers)
    blocks = [
        Block(
            round(max(_LEAST, 100 * (row.params_before / largest) ** 0.25), 1),
            round(100 * min(1.0, row.kept), 1),
            colours.get(kind, "accent"),
            title,
        )
        for row, kind, title in zip(layers, kinds, titles, strict=True)
    ]
    empty = "; an empty one left the network" if REMOVED in kinds else ""
    return PlanDrawing(
        blocks,
        [(kind.replace("_", " "), role) for kind, role in colours.items()],
        "Every layer from the input to the output: the outline is what it had, the filling what is "
        f"left{empty}. Point at a layer for its row of the table.",
    )


_WRAPPING = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)
_OPENING_TAG = re.compile(r"<svg[^>]*>", re.DOTALL)
_VIEW_BOX = re.compile(r'viewBox="[^"]*"')
_ID = re.compile(r' id="([^"]*)"')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]*")  # the form of older versions of matplotlib
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_STYLE_SHEET = re.compile(r"<style.*?</style>", re.DOTALL)
_LINE_BREAK = re.compile(r"\s*\n\s*")


def inline_svg(figure: Figure, identifier: str, description: str) -> str:
    """Turn a figure into an `<svg>` element for use inside an HTML page.

    Its colours become CSS variables (`var(--accent)`, ...), its text stays text in the page's own font, and
    it refers to nothing outside the page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": identifier}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = _STYLE_SHEET.sub("", _WRAPPING.sub("", buffer.getvalue()))
    view_box = _VIEW_BOX.search(text)
    opening = (
        f'<svg role="img" aria-label="{html.escape(description)}" {view_box.group() if view_box else ""}>'
    )
    text = _OPENING_TAG.sub(lambda _: opening, text, count=1)
    text = _ID.sub(lambda match: match.group() if f"#{match.group(1)}" in text else "", text)
    text = _FONT_FAMILY.sub("", _FONT.sub(r"font-size: \1px", text))
    for role, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{role})")
    return _LINE_BREAK.sub("\n", text).strip()


@dataclass(frozen=True)
class Drawing:
    svg: str
    description: str
    caption: str


def drawing(figure: Figure, identifier: str, description: str, caption: str) -> Drawing:
    return Drawing(inline_svg(figure, identifier, description), description, caption)
