"""Group the channels of an output by unit, such as boxes in pixels beside probabilities.

A squared error over all numbers of such an output is dominated by the largest quantity. Channels are grouped
by the statistics of the outputs, so that every group has an error relative to its own variance.

Two criteria separate channels: probabilities lie between 0 and 1, and deviations over the inputs differ by
`_GAP` or more with none in between. Channels of a feature map differ by as much, so that a group counts only

- where it separates everywhere: at nine in ten other positions (anchors, pixels) it is the larger, too;
- where it is a range of channels, or a few kinds of ranges repeat, as (x, y, confidence) does;
- and, of the smaller deviations, where it has a sixteenth of the channels: fewer are unused ones; fewer
  probabilities are the first or the last channels.

The few numbers of a row, as of a regression, are separated by their deviations alone. There are at most
`_MOST` groups. Channels that do not vary join the group of the size nearest to theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_GAP = 5.0
"""Ratio of the deviations of two quantities: by one unit an error of the lesser counts a 25th or less."""
_EVERYWHERE = 0.9
_LEAST_SHARE = 1 / 16
_MOST = 8
_FEWEST, _FEWEST_NUMBERS = 4, 24
"""Inputs below which deviations differ by chance, and numbers of a channel that are between 0 and 1 by it."""
SEVERAL_UNITS = 16
"""Numbers of a row that may each be a quantity of its own; more are an embedding, or coordinates."""
HARDLY_VARIES = 1e-3
"""Standard deviation / root mean square below which numbers are a constant, as far as can be told."""
_ELEMENTS = 2**22
"""Numbers that are converted to float64 at a time."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Statistics of every output number over `count` inputs; arrays have the shape of one output."""

    count: int
    mean: Array
    variance: Array
    low: Array
    high: Array
    active: Array

    @classmethod
    def of(cls, batches: Iterable[Array]) -> Answers:
        """Accumulate the statistics of outputs of one shape, inputs on the first axis."""
        count, mean, lost, low, high, active = 0, *[np.zeros(())] * 5
        for part in in_parts(batches):  # moments about each part's mean, to avoid cancellation
            known, new = part.mean(0), len(part)
            least, most = part.min(0), part.max(0)
            active = active + np.count_nonzero(part, axis=0)
            part -= known
            inner = np.square(part, out=part).sum(0)
            if not count:
                mean, lost, low, high = known, inner, least, most
            else:  # Chan, Golub & LeVeque 1983
                step = known - mean
                mean = mean + step * (new / (count + new))
                lost = lost + inner + np.square(step) * (count * new / (count + new))
                low, high = np.minimum(low, least), np.maximum(high, most)
            count += new
        return cls(count, mean, lost / max(1, count - 1), low, high, active / max(1, count))

    @property
    def square(self) -> Array:
        """Mean squares."""
        found: Array = np.square(self.mean) + self.variance * (self.count - 1) / max(1, self.count)
        return found

    def spread(self, chosen: Any = ...) -> float:
        """Return the mean variance of some numbers, or their mean square where they hardly vary."""
        if not self.mean.size:
            return 1.0
        variance, square = float(self.variance[chosen].mean()), float(self.square[chosen].mean())
        return variance if variance > HARDLY_VARIES**2 * square else square or 1.0


def known_answers(batches: Iterable[Array]) -> Answers:
    """Return the statistics of outputs; if their shapes differ, of all numbers together."""
    answers = [np.atleast_1d(each) for each in batches]
    alike = len({each.shape[1:] for each in answers}) <= 1
    return Answers.of(answers if alike else map(np.ravel, answers))


def in_parts(batches: Iterable[Array]) -> Iterable[Array]:
    """Yield the inputs of batches a few at a time, in float64."""
    for batch in batches:
        step = max(1, _ELEMENTS // max(1, batch[:1].size))
        for start in range(0, len(batch), step):
            yield batch[start : start + step].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Units:
    """Groups of an output's channels, one unit each, and the variance of each (`spreads`)."""

    axis: int
    groups: tuple[Array, ...]
    spreads: Array

    @property
    def names(self) -> list[str]:
        """The channels of every group as ranges, such as `4:24` or `0:2, 3:5, ...`."""
        return [_ranges(group) for group in self.groups]

    def of_channels(self, values: Sequence[float] | Array) -> Array:
        """Return the value of every channel's group."""
        found = np.empty(sum(map(len, self.groups)))
        for group, value in zip(self.groups, values, strict=True):
            found[group] = value
        return found

    def weights(self, dimensions: int) -> Array:
        """Return the factor of each channel, in so many axes, inputs first, at which groups count alike."""
        channels = sum(map(len, self.groups))
        pairs = zip(self.groups, self.spreads, strict=True)
        shares = [channels / (len(self.groups) * len(group) * spread) for group, spread in pairs]
        placed = [-1 if axis == self.axis else 1 for axis in range(dimensions)]
        return np.sqrt(self.of_channels(shares)).reshape(placed)


def output_weight(answers: Answers, units: Units | None) -> Array:
    """Return the factors that give an output's quantities, and the output among others, equal weight."""
    if units is not None:
        return units.weights(1 + answers.mean.ndim)
    square = float(answers.square.mean()) if answers.mean.size else 0.0
    return np.array(square**-0.5 if 0 < square < np.inf else 1.0)


def find_units(answers: Answers) -> Units | None:
    """Find quantities of different units along the axis on which they differ most."""
    shape = answers.mean.shape
    if not answers.mean.size or not np.isfinite(answers.variance).all():
        return None
    axes = list(range(len(shape)))
    if len(shape) > 2:  # channels of a map are first or last; equal sizes at the end are its pixels
        axes = [0] if shape[-1] == shape[-2] else [0, len(shape) - 1]
    found: list[tuple[float, Units]] = []
    for axis in axes:
        groups = _groups(answers, axis)
        if len(groups) < 2:
            continue
        spreads = [answers.spread((slice(None),) * axis + (group,)) for group in groups]
        found.append((max(spreads) / min(spreads), Units(axis + 1, groups, np.array(spreads))))
    return max(found, key=lambda each: each[0])[1] if found else None


def _groups(answers: Answers, axis: int) -> tuple[Array, ...]:
    """Return the channels of each quantity on an axis of one answer, in the order of the channels."""
    variance, square, low, high, active = (
        np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1)
        for each in (answers.variance, answers.square, answers.low, answers.high, answers.active)
    )
    told = variance if answers.count > 1 else square
    (varying,) = np.nonzero(told.mean(1) > HARDLY_VARIES**2 * square.mean(1))
    if len(varying) < 2:
        return ()
    few = answers.mean.ndim == 1 and len(variance) <= SEVERAL_UNITS
    found = np.zeros(len(varying), dtype=int)
    if not few and answers.count * low.shape[1] >= _FEWEST_NUMBERS:
        found = _by_kind(low[varying], high[varying])
    if answers.count >= _FEWEST:
        found = _by_scale(variance[varying], active[varying], found, few)
    labels = np.empty(len(variance), dtype=int)
    labels[varying] = found
    sizes = np.array([square[varying][found == label].mean() for label in range(found.max() + 1)])
    for channel in np.setdiff1d(np.arange(len(variance)), varying):
        labels[channel] = np.abs(np.log(sizes / max(square[channel].mean(), 1e-300))).argmin()
    groups = [np.flatnonzero(labels == label) for label in range(len(sizes))]
    return tuple(sorted(groups, key=lambda group: int(group[0])))


def _by_kind(low: Array, high: Array) -> Array:
    """Return 1 for channels of probabilities, 0 for all others; arrays are (channels, positions)."""
    inside = (low >= 0) & (high <= 1)
    shares: Array = np.logical_and.reduce(inside, axis=1)
    labels = shares.astype(int)
    # Behind a ReLU or a clamp zeros are exact: channels that stay below 1 there are no probabilities.
    if shares.all() or not shares.any() or low[~shares].min() == 0:
        return np.zeros_like(labels)
    reached = high.max(0) > low.min(0)
    everywhere = np.logical_or.reduce(~inside, axis=0)[reached].mean() >= _EVERYWHERE
    enough = shares.mean() >= _LEAST_SHARE or shares[0] or shares[-1]
    return labels if everywhere and enough and _in_ranges(labels) else np.zeros_like(labels)


def _by_scale(variance: Array, active: Array, labels: Array, few: bool) -> Array:
    """Split groups of channels by variance (channels, positions); return the group of each channel."""
    pending = list(range(labels.max() + 1))
    while pending and labels.max() + 1 < _MOST:
        label = pending.pop()
        parted = _cut(variance, active, labels, label, few)
        if parted is not None:
            labels = parted
            pending += [label, int(labels.max())]
    return labels


def _cut(variance: Array, active: Array, labels: Array, label: int, few: bool) -> Array | None:
    """Split a group at its largest gap in variance that separates quantities; None without one."""
    (members,) = np.nonzero(labels == label)
    scales = variance[members].mean(1) / active[members].mean(1)
    order = np.argsort(scales)
    ratios = scales[order[1:]] / scales[order[:-1]]
    for place in np.argsort(-ratios, kind="stable")[:_MOST]:
        if ratios[place] < _GAP**2:
            return None
        lower, upper = members[order[: place + 1]], members[order[place + 1 :]]
        parted = labels.copy()
        parted[lower] = labels.max() + 1
        high = variance[upper].mean(0) * active[lower].mean(0)
        low = variance[lower].mean(0) * active[upper].mean(0)
        larger = (high >= _GAP**2 * low)[active[members].any(0)]
        enough = len(lower) >= _LEAST_SHARE * len(labels)
        if larger.mean() >= _EVERYWHERE and (few or (enough and _in_ranges(parted))):
            return parted
    return None


def _in_ranges(labels: Array) -> bool:
    """Tell whether groups are ranges of channels, or few kinds of ranges that repeat."""
    kinds = {(label, len(list(run))) for label, run in groupby(labels.tolist())}
    return len(kinds) <= len(np.unique(labels)) + 1


def _ranges(channels: Array) -> str:
    """Return ascending channels as up to three ranges."""
    parts = np.split(channels, np.flatnonzero(np.diff(channels) > 1) + 1)
    named = [f"{part[0]}:{part[-1] + 1}" if len(part) > 1 else f"{part[0]}" for part in parts]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else "")
