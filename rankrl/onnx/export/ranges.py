"""Ranges of tensors on calibration inputs, which are run one by one.

What lies outside a range is cut off, and the wider the range the coarser its 256 steps. Where few numbers lie
far from all others, cutting them off costs less than it saves (Banner et al., NeurIPS 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime

from rankrl.onnx.runtimes.onnxruntime_cpu import inference_session

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
Cut = Callable[[Feed, int], Iterable[Feed]]
"""Cuts a batch into smaller ones of so many inputs."""
Range = tuple[np.float32, np.float32]

_BINS = 2048
_COUNTED = 2**16
"""Numbers that are counted of a tensor at a time, at least."""
_STEPS = 255
_SHARES = np.linspace(0.1, 1.0, 46)
"""Of the ends of a range that are tried, both alike; each end is then moved by itself."""
_MOVES = np.linspace(0.5, 1.5, 41)


_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)


@dataclass
class Spread:
    """What a tensor was on calibration inputs.

    Attributes:
        lowest: Its smallest number.
        highest: Its largest number.
        counts: How many numbers lay in each of as many equal parts between them.
    """

    lowest: np.float32 = _HIGHEST
    highest: np.float32 = _LOWEST
    counts: Array | None = None

    def stretch(self, values: Array) -> None:
        """Note the ends of some numbers."""
        if values.size:
            self.lowest = min(self.lowest, np.nanmin(values))
            self.highest = max(self.highest, np.nanmax(values))

    def count(self, values: Array) -> None:
        """Count numbers that lie between the ends, some of them where there are many."""
        step = values.size // _COUNTED | 1  # odd, so that it goes through all columns of an image
        counts, _ = np.histogram(
            values.reshape(-1)[::step], _BINS, (float(self.ends[0]), float(self.ends[1]))
        )
        self.counts = counts if self.counts is None else self.counts + counts

    @property
    def ends(self) -> Range:
        """The smallest and the largest number; zeros where there were none."""
        return (self.lowest, self.highest) if self.lowest <= self.highest else (np.float32(0), np.float32(0))

    def percentile(self, share: float) -> Range:
        """Return the range without the smallest and the largest numbers, up to a share of each."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        below = np.cumsum(self.counts) / self.counts.sum()
        edges = np.linspace(low, high, _BINS + 1)
        first, last = np.searchsorted(below, (share, 1 - share))
        return np.float32(edges[first]), np.float32(edges[min(last, _BINS - 1) + 1])

    def least_square(self) -> Range:
        """Return the range in which the rounded numbers are closest to the numbers counted."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        edges = np.linspace(low, high, _BINS + 1)
        centres = (edges[1:] + edges[:-1]) / 2
        centres[(edges[:-1] <= 0) & (edges[1:] >= 0)] = 0.0  # most often it is zero exactly
        centres, counts = centres[self.counts > 0], self.counts[self.counts > 0]

        def error(bottom: float, top: float) -> float:
            step = (top - bottom) / _STEPS
            zero = np.round(-bottom / step)
            rounded = (np.clip(np.round(centres / step) + zero, 0, _STEPS) - zero) * step
            return float(counts @ (rounded - centres) ** 2)

        bottom, top = min(0.0, float(low)), max(0.0, float(high))  # a range holds zero
        share = min(_SHARES, key=lambda share: error(share * bottom, share * top))
        bottom, top = share * bottom, share * top
        if bottom < 0 < top:
            top = min(_MOVES * top, key=lambda end: error(bottom, end))
            bottom = min(_MOVES * bottom, key=lambda end: error(end, top))
        return max(low, np.float32(bottom)), min(high, np.float32(top))


def collect_spreads(
    model: onnx.ModelProto, names: Sequence[str], batches: Iterable[Feed], cut: Cut
) -> dict[str, Spread]:
    """Return the ends of tensors on calibration inputs, nothing counted.

    Args:
        model: The network.
        names: Names of float tensors.
        batches: Calibration inputs.
        cut: Cuts batches into smaller ones.
    """
    spreads = {name: Spread() for name in names}
    for name, values in tensors_of(model, names, batches, cut):
        spreads[name].stretch(values)
    return spreads


def count_values(
    model: onnx.ModelProto, spreads: Mapping[str, Spread], batches: Iterable[Feed], cut: Cut
) -> None:
    """Count the numbers of tensors within their ends; arguments as in `collect_spreads`."""
    for name, values in tensors_of(model, list(spreads), batches, cut):
        spreads[name].count(values)


def tensors_of(
    model: onnx.ModelProto, names: Sequence[str], batches: Iterable[Feed], cut: Cut
) -> Iterator[tuple[str, Array]]:
    """Yield tensors by name; only those of one input are held at a time.

    Args:
        model: The network.
        names: Names of float tensors, inputs of the network among them.
        batches: Calibration inputs.
        cut: Cuts batches into smaller ones.
    """
    entries = {entry.name for entry in model.graph.input}
    computed = [name for name in names if name not in entries]
    session = _session(model, computed)
    for batch in batches:
        for part in cut(batch, 1):
            values = {name: np.asarray(array, order="C") for name, array in part.items()}
            yield from ((name, values[name]) for name in names if name in entries)
            if computed:
                yield from zip(computed, session.run(computed, values), strict=True)


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> onnxruntime.InferenceSession:
    """Open a network in onnxruntime that returns other tensors, computed as they are written."""
    own = list(model.graph.output)
    try:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or [own[0].name])
        content = model.SerializeToString()
    finally:
        del model.graph.output[:]
        model.graph.output.extend(own)
    return inference_session(content, optimised=False)
