"""Axes with honest labels: no two are equal, no per cent exceeds 100, a single point is in the middle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, MaxNLocator, ScalarFormatter

_MARGIN = 0.05
_ALONE = 0.01
_STEPS = (1, 2, 2.5, 5, 10)
_MOST_DECIMALS = 6


class PercentTicks(Formatter):
    """Writes fractions as per cent with as many decimals as the steps between them need."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of one tick."""
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the labels of all ticks."""
        decimals = percent_decimals(values)
        return [f"{100 * value + 0.0:.{decimals}f}%".replace("-", "\N{MINUS SIGN}") for value in values]


def percent_decimals(values: Sequence[float]) -> int:
    """The decimals with which fractions are written as per cent, true to a hundredth of their steps."""
    step = min((after - before for before, after in pairwise(sorted(set(values)))), default=1e-4)
    for decimals in range(_MOST_DECIMALS):
        if all(abs(round(value, decimals + 2) - value) <= step / 100 for value in values):
            return decimals
    return _MOST_DECIMALS


def percent_axis(axes: Axes, *, which: str = "y", bins: int = 6, low: float | None = None) -> None:
    """Finish an axis of fractions, once everything is drawn on it and on those that share it.

    Its limits leave room around what is drawn and never leave 0 to 100 %; a value alone is in the middle,
    with its neighbours. What lies on a limit is drawn whole.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    least, most = _drawn(axes, which)
    margin = _MARGIN * (most - least) or _ALONE
    start = max(0.0, least - margin) if low is None else low
    end = most + margin if most > 1 else min(1.0, most + margin)
    _set_limits(axes, which, start, end)
    axis.set_major_locator(MaxNLocator(nbins=bins, steps=_STEPS))
    axis.set_major_formatter(PercentTicks())
    for artist in axes.lines:
        artist.set_clip_on(False)


def number_axis(axes: Axes, *, low: float | None = None) -> None:
    """Finish a vertical axis of plain numbers (losses, rewards): labels in full, a value alone in the middle.

    Args:
        axes: The panel.
        low: What the axis does not go below, if anything.
    """
    least, most = _drawn(axes, "y")
    margin = _MARGIN * (most - least) or _MARGIN * abs(most) or _ALONE
    start = least - margin if low is None else max(low, least - margin)
    axes.set_ylim(start, most + margin)
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """Write an axis's numbers in full, never as an offset and differences from it."""
    axis.set_major_locator(MaxNLocator(nbins=6, steps=_STEPS))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))


def whole_axis(axes: Axes, *, which: str = "x", bins: int = 8) -> None:
    """Finish an axis that counts: whole numbers only, and one alone in the middle."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    least, most = _drawn(axes, which)
    if most - least < 1:
        _set_limits(axes, which, least - 0.5, most + 0.5)
    axis.set_major_locator(MaxNLocator(integer=True, nbins=bins, steps=(1, 2, 5, 10), min_n_ticks=1))


def _drawn(axes: Axes, which: str) -> tuple[float, float]:
    """Return the least and the largest value drawn on a panel or on those that share its axis."""
    shared = (axes.get_shared_x_axes() if which == "x" else axes.get_shared_y_axes()).get_siblings(axes)
    spans = [panel.dataLim.intervalx if which == "x" else panel.dataLim.intervaly for panel in shared]
    values = [float(value) for span in spans for value in span if math.isfinite(value)]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _set_limits(axes: Axes, which: str, start: float, end: float) -> None:
    if which == "x":
        axes.set_xlim(start, end)
    else:
        axes.set_ylim(start, end)
