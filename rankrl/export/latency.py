"""Latency of ONNX files in onnxruntime, measured so that two models can be compared on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from rankrl.export.errors import ExportError
from rankrl.export.session import fixed_batch, open_session, run

_SPREAD_PERCENTILES = (10, 90)


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass.

    Attributes:
        median_ms: Median over the runs, in milliseconds.
        low_ms: 10th percentile, in milliseconds.
        high_ms: 90th percentile, in milliseconds.
        batch: Inputs per forward pass.
        threads: Threads that onnxruntime computed with.
        runs: Number of timed forward passes.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    batch: int
    threads: int
    runs: int

    def __str__(self) -> str:
        return (
            f"{self.median_ms:.2f} ms ({self.low_ms:.2f}–{self.high_ms:.2f}), batch {self.batch}, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        )


@dataclass(frozen=True)
class LatencyComparison:
    """Two models timed in turns.

    Attributes:
        baseline: Latency of the first model.
        compressed: Latency of the second.
        ratio: Median over the turns of baseline ÷ compressed; above 1 the second model is the faster one.
        ratio_low: 10th percentile of that ratio.
        ratio_high: 90th percentile of that ratio.
    """

    baseline: Latency
    compressed: Latency
    ratio: float
    ratio_low: float
    ratio_high: float


def measure_latency(
    path: str | Path, *, batch: int = 64, threads: int = 1, runs: int = 30, warm_up: int = 3
) -> Latency:
    """Time an ONNX model on standard normal inputs.

    Args:
        path: The ONNX file.
        batch: Inputs per forward pass; must be the file's own where that is fixed.
        threads: Threads for one operator.
        runs: Timed forward passes.
        warm_up: Untimed forward passes before them.

    Returns:
        Median and spread.

    Raises:
        ExportError: The file cannot be loaded, or an option is out of range or does not fit the file.
    """
    times = _timed_turns([path], batch=batch, threads=threads, runs=runs, warm_up=warm_up)
    return _summary(times[:, 0], batch, threads)


def compare_latency(
    baseline: str | Path,
    compressed: str | Path,
    *,
    batch: int = 64,
    threads: int = 1,
    runs: int = 30,
    warm_up: int = 3,
) -> LatencyComparison:
    """Time two ONNX models in turns (A B, B A, A B, ...), so that what disturbs the machine disturbs both.

    Args:
        baseline: ONNX file of the original model.
        compressed: ONNX file of the compressed one.
        batch: Inputs per forward pass; must be the files' own where that is fixed.
        threads: Threads for one operator.
        runs: Timed forward passes of each model.
        warm_up: Untimed forward passes of each before them.

    Returns:
        Both latencies, and the ratio with its spread taken turn by turn.

    Raises:
        ExportError: A file cannot be loaded, or an option is out of range or does not fit a file.
    """
    times = _timed_turns([baseline, compressed], batch=batch, threads=threads, runs=runs, warm_up=warm_up)
    ratios = times[:, 0] / times[:, 1]
    low, high = np.percentile(ratios, _SPREAD_PERCENTILES)
    return LatencyComparison(
        baseline=_summary(times[:, 0], batch, threads),
        compressed=_summary(times[:, 1], batch, threads),
        ratio=float(np.median(ratios)),
        ratio_low=float(low),
        ratio_high=float(high),
    )


def _timed_turns(
    paths: Sequence[str | Path], *, batch: int, threads: int, runs: int, warm_up: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Milliseconds of every forward pass, shape (runs, models)."""
    for name, value, least in (("batch", batch, 1), ("runs", runs, 1), ("warm_up", warm_up, 0)):
        if value < least:
            raise ExportError(f"{name} is {value}; it must be at least {least}.")
    sessions = [open_session(path, threads=threads) for path in paths]
    inputs = [_random_batch(session, path, batch) for session, path in zip(sessions, paths, strict=True)]
    for session, values in zip(sessions, inputs, strict=True):
        for _ in range(warm_up):
            run(session, values)
    times = np.zeros((runs, len(sessions)))
    for turn in range(runs):
        order = range(len(sessions)) if turn % 2 == 0 else reversed(range(len(sessions)))
        for index in order:
            start = time.perf_counter_ns()
            run(sessions[index], inputs[index])
            times[turn, index] = (time.perf_counter_ns() - start) / 1e6
    return times


def _random_batch(
    session: onnxruntime.InferenceSession, path: str | Path, batch: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    fixed = fixed_batch(session)
    if fixed not in (None, batch):
        raise ExportError(
            f"{path} was exported for batches of {fixed}; measure its latency with batch={fixed}."
        )
    shape = session.get_inputs()[0].shape[1:]
    if not all(isinstance(size, int) for size in shape):
        raise ExportError(
            f"{path} leaves the input sizes {shape} open; export it with fixed ones to time it."
        )
    return np.random.default_rng(0).standard_normal((batch, *shape), dtype=np.float32)


def _summary(times: np.ndarray[Any, np.dtype[np.float64]], batch: int, threads: int) -> Latency:
    low, high = np.percentile(times, _SPREAD_PERCENTILES)
    return Latency(
        median_ms=float(np.median(times)),
        low_ms=float(low),
        high_ms=float(high),
        batch=batch,
        threads=threads,
        runs=len(times),
    )
