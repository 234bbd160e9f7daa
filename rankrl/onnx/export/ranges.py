"""Collect and choose the ranges of activations in integers, and decide whether weights get 7 or 8 bits."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from torch import nn

from decomposition import Inputs, calibrate_ranges, integer_layers, rounded_parameters
from decomposition.network.rounding import REDUCED_BITS, reduce_weight_range
from decomposition.network.surgery import copied
from rankrl.onnx.protobuf import save_model
from rankrl.onnx.runtimes import open_session
from rankrl.onnx.runtimes.onnx_runtime import inference_session

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
Cut = Callable[[Feed, int], Iterable[Feed]]
"""Cuts a batch into smaller ones of so many inputs."""
Range = tuple[np.float32, np.float32]

_BINS = 4096
"""Parts into which the numbers on either side of zero are sorted; at least half of them are in use."""
_COUNTED = 2**16
"""Numbers that are counted of a tensor at a time, at least."""
_STEPS = 255  # between the ends of a uint8 range
_SHARES = np.linspace(0.1, 1.0, 46)
"""Of the ends of a range that are tried, both alike; each end is then moved by itself."""
_MOVES = np.linspace(0.5, 1.5, 41)
_SMALLEST = 1e-30
"""The least that a tensor of zeros is taken to reach to."""

_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)


@dataclass
class Spread:
    """Range and histogram of a tensor on calibration inputs."""

    lowest: np.float32 = _HIGHEST
    highest: np.float32 = _LOWEST
    counts: Array | None = None
    width: float = 0.0

    def add(self, values: Array, *, counted: bool = True) -> None:
        """Update the range and, if `counted`, the histogram, with a subsample of a large array."""
        if not values.size:
            return
        lowest, highest = values.min(), values.max()
        finite = np.isfinite(highest - lowest)
        if not finite:
            lowest, highest = np.nanmin(values), np.nanmax(values)
        self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
        if counted and finite:
            step = values.size // _COUNTED | 1  # odd, so that it goes through all columns of an image
            self._count(values.reshape(-1)[::step], float(max(-lowest, highest)))

    def _count(self, values: Array, peak: float) -> None:
        needed = 2.0 ** (np.floor(np.log2(max(peak, _SMALLEST) / _BINS)) + 1)
        if self.counts is None:
            self.counts, self.width = np.zeros(2 * _BINS, np.int64), needed
        while self.width < needed:
            joined = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.pad(joined, _BINS // 2)
            self.width *= 2
        parts = (values * np.float32(1 / self.width) + np.float32(_BINS)).astype(np.int32)
        self.counts += np.bincount(parts.clip(0, 2 * _BINS - 1), minlength=2 * _BINS)

    @property
    def _edges(self) -> Array:
        return np.arange(-_BINS, _BINS + 1) * self.width

    @property
    def ends(self) -> Range:
        """The smallest and the largest number; zeros where there were none."""
        return (self.lowest, self.highest) if self.lowest <= self.highest else (np.float32(0), np.float32(0))

    def percentile(self, share: float) -> Range:
        """Return the range without a share of the smallest and a share of the largest numbers."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        below = np.cumsum(self.counts) / self.counts.sum()
        first, last = np.searchsorted(below, (share, 1 - share))
        edges = self._edges.astype(np.float32)
        return max(low, edges[first]), min(high, edges[min(last, 2 * _BINS - 1) + 1])

    def least_square(self) -> Range:
        """Return the range with the least squared error of rounding over the histogram."""
        low, high = self.ends
        if self.counts is None or low == high:
            return low, high
        centres = self._edges[:-1] + self.width / 2
        centres[_BINS] = 0.0  # most often it is zero exactly
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
    model: onnx.ModelProto, names: Sequence[str], inputs: Iterable[Feed], *, counted: int = 0
) -> dict[str, Spread]:
    """Return the ranges of tensors on calibration inputs, with histograms over the first `counted` inputs."""
    spreads = {name: Spread() for name in names}
    run = tensors_of(model, names)
    for number, feed in enumerate(inputs):
        for name, values in run(feed).items():
            spreads[name].add(values, counted=number < counted)
    return spreads


def tensors_of(model: onnx.ModelProto, names: Iterable[str]) -> Callable[[Feed], dict[str, Array]]:
    """Return a function that computes the named tensors of a model for an input."""
    entries = {entry.name for entry in model.graph.input}
    taken = [name for name in names if name in entries]
    computed = [name for name in names if name not in entries]
    session = _session(model, computed)

    def run(feed: Feed) -> dict[str, Array]:
        values = {name: np.asarray(array, order="C") for name, array in feed.items()}
        tensors = {name: values[name] for name in taken}
        if computed:
            tensors |= zip(computed, session.run(computed, values), strict=True)
        return tensors

    return run


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> onnxruntime.InferenceSession:
    """Open a model in onnxruntime with inner tensors as outputs, without optimisations that remove them."""
    own = list(model.graph.output)
    try:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or [own[0].name])
        content = model.SerializeToString()
    finally:
        del model.graph.output[:]
        model.graph.output.extend(own)
    return inference_session(content, 1, optimised=False, arena=False)


@dataclass(frozen=True)
class RangeChoice:
    """The method by which activation ranges and biases of integer nodes are chosen, and its results."""

    way: str
    corrected: bool = False
    reduced: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict, repr=False)
    moves: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def without_values(self) -> RangeChoice:
        """Return the method alone, for a network with other weights, whose ranges are measured anew."""
        return replace(self, ranges={}, moves={})

    def renamed(self, names: Mapping[str, str]) -> RangeChoice:
        """Return the choice for a network whose tensors have other names."""
        ranges = {new: self.ranges[old] for new, old in names.items() if old in self.ranges}
        moves = {new: self.moves[old] for new, old in names.items() if old in self.moves}
        return replace(self, ranges=ranges, moves=moves)


_OPSET = 13  # of the file by which overflow is tested

log = logging.getLogger(__name__)


@cache
def sums_overflow() -> bool:
    """Test whether onnxruntime saturates sums of uint8 times int8 on this processor.

    It does on x86 processors without VNNI: AVX2, and AVX-512 before Cascade Lake.
    """
    terms = 64
    inputs = ir.val("inputs", ir.DataType.UINT8, [1, terms])
    weights = ir.val("weights", const_value=ir.tensor(np.full((terms, 16), 127, dtype=np.int8)))
    result = ir.val("sums", ir.DataType.INT32, [1, 16])
    node = ir.node("MatMulInteger", [inputs, weights], outputs=[result])
    opsets = {"": _OPSET}
    graph = ir.Graph([inputs], [result], nodes=[node], initializers=[weights], opset_imports=opsets)
    graph.name = "largest sums"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.onnx"
        save_model(ir.Model(graph, ir_version=8), path)
        (sums,) = open_session(path).run(np.full((1, terms), 255, dtype=np.uint8))
    overflow = bool((sums != 255 * 127 * terms).any())
    if overflow:
        log.info(
            "this processor's 8-bit sums overflow (no VNNI): weights of what computes in integers get 7 bits"
        )
    return overflow


def as_in_file(
    network: nn.Module, reduce_range: bool | None, inputs: Iterable[Inputs] | None = None
) -> nn.Module:
    """Return the network with the integers of its file: itself, or a copy with weights of 7 bits.

    All weights that compute in integers have the same bits: where a plan gives some of them 7, all get 7.
    """
    bits = integer_bits(network)
    if 8 not in bits or not (REDUCED_BITS in bits or reduces(reduce_range)):
        return network
    reduced = reduce_weight_range(copied(network))
    if inputs is not None:
        calibrate_ranges(reduced, inputs)
    return reduced


def integer_bits(network: nn.Module) -> set[int]:
    """Return the bits of the weights that compute in integers."""
    bits = rounded_parameters(network)
    return {bits[f"{name}.weight"] for name in integer_layers(network)}


def runnable(precisions: Sequence[str], reduce_range: bool | None = None) -> tuple[str, ...]:
    """Return precisions with `int7` in the place of `int8` where weights are to have 7 of 8 bits."""
    if "int8" not in precisions or not reduces(reduce_range):
        return tuple(precisions)
    return tuple(dict.fromkeys("int7" if name == "int8" else name for name in precisions))


def reduces(reduce_range: bool | None) -> bool:
    """Tell whether weights get 7 bits: as the option says, or where sums overflow on this processor."""
    return sums_overflow() if reduce_range is None else reduce_range
