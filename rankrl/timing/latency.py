"""Time forward passes of ONNX files, several files in turns, and compare the times.

With one thread the runtimes of the CPU work in the calling thread, and that thread's processor time is
measured, which excludes other processes on the core. With several threads, or on a GPU, it is wall time.
Other processes still slow passes down through caches and memory, and never speed them up: the time of a file
is the 10th percentile of its passes (Chen and Revels, "Robust benchmarking in noisy environments", 2016).
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from decomposition.memory import held_memory, shortage
from rankrl.device import processor_name, usable_cores
from rankrl.errors import ExportError, counted
from rankrl.kits.kit import FileGroup
from rankrl.onnx.protobuf import save_model
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, Session, get_runtime, open_session

log = logging.getLogger(__name__)

Clock = Literal["processor", "wall"]
Times = np.ndarray[Any, np.dtype[np.float64]]
"""Milliseconds."""

_FINE_CLOCK = 1e-6  # seconds; on some systems processor time has a resolution of 16 ms, too coarse for passes


def timed_passes(
    sessions: Sequence[Session],
    batches: Sequence[Batch],
    clocks: Sequence[Clock],
    *,
    runs: int,
    warm_up: int,
    settle: bool = False,
    enough: float = math.inf,
) -> tuple[Times, Times]:
    """Time open files in turns (A B C, C B A, ...).

    Args:
        sessions: The open files.
        batches: The inputs of each.
        clocks: The clock of each.
        runs: Turns.
        warm_up: Passes of each before them; a single one where passes are long.
        settle: Whether a pass that is not timed goes before each that is, unless passes are long.
        enough: Milliseconds of processor time of each, on average, after which a few turns suffice.
    """
    if warm_up:
        start = time.process_time()
        for session, batch in zip(sessions, batches, strict=True):
            session.run(batch)
        ms = 1e3 * (time.process_time() - start) / len(sessions)
        settle = settle and ms < _LONG
        runs = int(min(runs, max(_FEWEST_TURNS, enough / ms))) if ms > 0 else runs
        for session, batch in zip(sessions, batches, strict=True):
            for _ in range(warm_up - 1 if ms < _LONG else 0):
                session.run(batch)
    times, on_the_wall = np.zeros((runs, len(sessions))), np.zeros((runs, len(sessions)))
    for turn in range(runs):
        order = range(len(sessions)) if turn % 2 == 0 else reversed(range(len(sessions)))
        for index in order:
            session, batch, read = sessions[index], batches[index], _ticks(clocks[index])
            if settle:
                session.run(batch)
            wall, start = time.perf_counter_ns(), read()
            session.run(batch)
            times[turn, index] = (read() - start) / 1e6
            on_the_wall[turn, index] = (time.perf_counter_ns() - wall) / 1e6
    return times, on_the_wall


def clock_for(threads: int, runtime: str = DEFAULT_RUNTIME) -> Clock:
    """Return the clock for sessions with this number of threads in a runtime."""
    fine = time.get_clock_info("thread_time").resolution <= _FINE_CLOCK
    alone = threads == 1 and get_runtime(runtime).in_calling_thread
    return "processor" if alone and fine else "wall"


def _ticks(clock: Clock) -> Callable[[], int]:
    """Return the function that reads a clock, in nanoseconds."""
    return time.thread_time_ns if clock == "processor" else time.perf_counter_ns


def measuring_conditions(batch: int, threads: int, runtime: str = DEFAULT_RUNTIME) -> str:
    """Return everything besides the layers on which times depend, for readers and cache keys."""
    return (
        f"{runtime} {get_runtime(runtime).version}, batch {batch}, threads {threads}, {processor_name()}, "
        f"ms of {clock_for(threads, runtime)} time"
    )


SMALLEST_CHANGE = 0.03
"""Two sessions of the same file differ by where their memory lies: by up to 2.4 % in 60 comparisons on a busy
machine, 7 of which would count as changes by the interval alone."""
# With five busy processes on two cores, ratios of medians are off by 7 to 12 % (root mean square of 12 runs
# of 30 turns, ResNet-20), those of 10th percentiles by 4 to 8 %, of 90 turns by 3 to 7 %.
_PERCENTILES = (10, 50, 90)
_NARROW = 0.02  # relative width of an interval at which no more turns are timed
_UNSURE = 0.1  # relative width of an interval that chooses nothing: sums of layers' times are nearer
_ROUNDS = 3
_LONG = 5.0
"""Milliseconds of a pass that fills the caches by itself."""
_FEWEST_TURNS = 5
_ENOUGH_OF_A_LAYER = 100.0
"""Milliseconds of passes of a layer after which the 10th percentile hardly moves."""
_LARGE_ARENA = 1e8
"""Bytes of a session beside which no other one is open where layers are timed."""
_ENOUGH = 5_000.0  # milliseconds of passes after which no further round begins
_INTERVAL_PERCENTILES = (2.5, 97.5)  # 95 % bootstrap interval
_RESAMPLES = 2000  # of the turns, for the bootstrap
_BUSY_SHARE = 0.1  # of wall time waited for a core
_BUSY_LOAD = 0.5  # of a core, beyond those there are: our own work before the timing counts as load too


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass: the 10th percentile, the median and the 90th percentile of the passes."""

    ms: float
    median_ms: float
    high_ms: float
    batch: int
    threads: int
    runs: int
    clock: Clock

    def __str__(self) -> str:
        return (
            f"{self.ms:.2f} ms (median {self.median_ms:.2f}), batch {self.batch}, "
            f"{counted(self.threads, 'thread')}"
        )


@dataclass(frozen=True)
class RelativeTime:
    """Time of a network / that of the original."""

    share: float
    width: float = 0.0

    def keeps(self, fraction: float) -> bool:
        """Tell whether a second timing of the network would stay within a fraction of the time, too.

        The margin is the width of the interval, and at least half the difference of two sessions of one file.
        """
        return self.share + max(self.width, self.share * SMALLEST_CHANGE / 2) <= fraction

    def misses(self, fraction: float) -> bool:
        """Tell whether the whole interval lies above a fraction of the original."""
        return self.share - self.width / 2 > fraction

    def or_expected(self, expected: float) -> RelativeTime:
        """Return the expected time where the interval of the measured one is too wide to choose by."""
        if self.width <= _UNSURE * self.share:
            return self
        low, high = self.share - self.width / 2, self.share + self.width / 2
        log.info("time between %.3f and %.3f is too unsure: %.3f, as expected, counts", low, high, expected)
        return RelativeTime(expected)


@dataclass(frozen=True)
class LatencyComparison:
    """Two models timed in turns."""

    baseline: Latency
    compressed: Latency
    ratio: float
    ratio_low: float
    ratio_high: float
    busy: str | None

    @property
    def share(self) -> RelativeTime:
        """Time of the second model / that of the first, with the width of its interval."""
        return RelativeTime(1 / self.ratio, 1 / self.ratio_low - 1 / self.ratio_high)

    @property
    def is_narrow(self) -> bool:
        """Whether more turns would tell little more of the ratio."""
        return self.ratio_high <= self.ratio_low * (1 + _NARROW)

    @property
    def unchanged(self) -> bool:
        """Whether the ratio lies within the noise."""
        return is_unchanged(self.ratio, self.ratio_low, self.ratio_high)


def is_unchanged(ratio: float, low: float | None = None, high: float | None = None) -> bool:
    """Tell whether a ratio of two times is within the noise, for reports and choices alike."""
    if max(ratio, 1 / ratio) < 1 + SMALLEST_CHANGE:
        return True
    return low is not None and high is not None and low <= 1 <= high


def measure_latency(
    path: str | Path,
    *,
    batch: int = 64,
    threads: int = 1,
    runs: int = 30,
    warm_up: int = 3,
    runtime: str = DEFAULT_RUNTIME,
    inputs: Batch | None = None,
) -> Latency:
    """Time an ONNX model on random inputs of its type: standard normal numbers, or bytes."""
    timed = time_in_turns(
        [(runtime, path)], batch=batch, threads=threads, runs=runs, warm_up=warm_up, inputs=inputs
    )
    return timed.latencies[0]


def compare_latency(
    baseline: str | Path,
    compressed: str | Path,
    *,
    batch: int = 64,
    threads: int = 1,
    runs: int = 30,
    warm_up: int = 3,
    runtime: str = DEFAULT_RUNTIME,
    inputs: Batch | None = None,
    enough: float = math.inf,
) -> LatencyComparison:
    """Time two ONNX models in turns (A B, B A, A B, ...), so that disturbances affect both.

    Where the interval of the ratio is wider than 2 %, as many turns follow in new sessions, twice at most,
    and none where the passes took more than five seconds. A round has fewer turns, five at least, where
    passes of each model take `enough` milliseconds.
    """
    files = [(runtime, baseline), (runtime, compressed)]
    turns = partial(
        time_in_turns,
        files,
        batch=batch,
        threads=threads,
        runs=runs,
        warm_up=warm_up,
        inputs=inputs,
        enough=enough,
    )
    timed = turns()
    for _ in range(_ROUNDS - 1):
        if timed.compare(0, 1).is_narrow or timed.times.sum() > _ENOUGH:
            break
        timed = timed.followed_by(turns())
    return timed.compare(0, 1)


@dataclass(frozen=True)
class TimedTurns:
    """Times of files that were run in turns, whatever the model and the runtime."""

    latencies: Sequence[Latency]
    times: Times
    busy: str | None

    def followed_by(self, others: TimedTurns) -> TimedTurns:
        """Join turns of the same files."""
        times = np.vstack([self.times, others.times])
        latencies = [
            replace(known, **_spread(column)) for known, column in zip(self.latencies, times.T, strict=True)
        ]
        return TimedTurns(latencies, times, self.busy or others.busy)

    def compare(self, baseline: int, compressed: int) -> LatencyComparison:
        """Compare two of the files by their positions."""
        before, after = self.latencies[baseline], self.latencies[compressed]
        runs = len(self.times)
        turns = np.random.default_rng(0).integers(runs, size=(_RESAMPLES, runs))
        resampled = np.percentile(self.times[:, [baseline, compressed]][turns], _PERCENTILES[0], axis=1)
        low, high = np.percentile(resampled[:, 0] / resampled[:, 1], _INTERVAL_PERCENTILES)
        return LatencyComparison(
            baseline=before,
            compressed=after,
            ratio=before.ms / after.ms,
            ratio_low=float(low),
            ratio_high=float(high),
            busy=self.busy,
        )


def time_in_turns(
    files: Sequence[tuple[str, str | Path]],
    *,
    batch: int = 64,
    threads: int = 1,
    runs: int = 30,
    warm_up: int = 3,
    inputs: Batch | None = None,
    enough: float = math.inf,
) -> TimedTurns:
    """Time several ONNX files in turns (A B C, C B A, ...), each in its runtime.

    Files of which sessions would together take more than half of the free memory are timed one after the
    other.
    """
    for name, value, least in (("batch", batch, 1), ("runs", runs, 1), ("warm_up", warm_up, 0)):
        if value < least:
            raise ExportError(f"{name} is {value}; it must be at least {least}.")
    load = _load_average()

    def opened(index: int) -> tuple[Session, Batch]:
        runtime, path = files[index]
        session = open_session(path, threads=threads, runtime=runtime)
        return session, _random_batch(session, path, batch) if inputs is None else inputs

    clocks = [clock_for(threads, runtime) for runtime, _ in files]
    times, on_the_wall = _timed_as_memory_allows(opened, clocks, runs=runs, warm_up=warm_up, enough=enough)
    waited = _share_waited(times, on_the_wall, clocks)
    latencies = [
        _summary(column, batch, threads, runtime) for column, (runtime, _) in zip(times.T, files, strict=True)
    ]
    return TimedTurns(latencies, times, _busy(waited, load))


def _timed_as_memory_allows(
    opened: Callable[[int], tuple[Session, Batch]],
    clocks: Sequence[Clock],
    *,
    runs: int,
    warm_up: int,
    settle: bool = False,
    enough: float = math.inf,
    largest: float = math.inf,
) -> tuple[Times, Times]:
    """Time files in turns, or one after the other where they lack room or the first takes `largest` bytes."""
    held, count = held_memory(), len(clocks)
    open_files = [opened(0)]
    if warm_up:
        open_files[0][0].run(open_files[0][1])
    taken = held_memory() - held
    lack = shortage(count * taken)
    apart = lack is not None or taken > largest
    if lack is not None and count > 1:
        log.info("%d files are timed one after the other: together they take %s", count, lack)
    columns: list[tuple[Times, Times]] = []
    for group in [[index] for index in range(count)] if apart else [[*range(count)]]:
        open_files += [opened(index) for index in group[len(open_files) :]]
        sessions, batches = zip(*open_files, strict=True)
        columns.append(
            timed_passes(
                sessions,
                batches,
                [clocks[index] for index in group],
                runs=len(columns[0][0]) if columns else runs,
                warm_up=warm_up,
                settle=settle,
                enough=math.inf if columns else enough,
            )
        )
        del sessions, batches
        open_files.clear()  # before the next group is opened
    times, on_the_wall = (np.hstack(each) for each in zip(*columns, strict=True))
    return times, on_the_wall


def _share_waited(times: Times, on_the_wall: Times, clocks: Sequence[Clock]) -> float | None:
    """Return the share of wall time that passes waited for a core; None where no processor time was taken."""
    known = [index for index, clock in enumerate(clocks) if clock == "processor"]
    return max(0.0, 1 - float(times[:, known].sum() / on_the_wall[:, known].sum())) if known else None


def _busy(waited: float | None, load: float | None) -> str | None:
    """Return the evidence that others used the cores that the timed passes needed, if there is any."""
    if waited is not None:
        seen = f"the timed passes waited {waited:.0%} of the time for a core".replace("%", " %")
        return seen if waited > _BUSY_SHARE else None
    cores = usable_cores()
    if load is not None and load > cores + _BUSY_LOAD:
        return f"the load average is {load:.1f} on {counted(cores, 'core')}"
    return None


def _load_average() -> float | None:
    """Return the number of runnable processes in the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _random_batch(session: Session, path: str | Path, batch: int) -> np.ndarray[Any, np.dtype[Any]]:
    if session.fixed_batch not in (None, batch):
        raise ExportError(
            f"{path} was exported for batches of {session.fixed_batch}; measure its latency with "
            f"batch={session.fixed_batch}."
        )
    sizes = [size for size in session.input_shape[1:] if size is not None]
    if len(sizes) < len(session.input_shape) - 1:
        raise ExportError(
            f"{path} leaves sizes of its input open, {session.input_shape[1:]}; export it with fixed ones to "
            "time it."
        )
    generator = np.random.default_rng(0)
    if session.input_dtype == np.uint8:
        return generator.integers(256, size=(batch, *sizes), dtype=np.uint8)
    if session.input_dtype == np.float32:
        return generator.standard_normal((batch, *sizes), dtype=np.float32)
    raise ExportError(
        f"{path} takes {session.input_type} and cannot be timed: random inputs are made for float32 and "
        "uint8 alone."
    )


def _summary(times: Times, batch: int, threads: int, runtime: str) -> Latency:
    clock = clock_for(threads, runtime)
    return Latency(**_spread(times), batch=batch, threads=threads, clock=clock)


def _spread(times: Times) -> dict[str, Any]:
    """Return the fields of `Latency` that follow from times."""
    low, median, high = np.percentile(times, _PERCENTILES)
    return {"ms": float(low), "median_ms": float(median), "high_ms": float(high), "runs": len(times)}


@dataclass(frozen=True)
class LocalStopwatch:
    """Times files in a runtime here; a `Stopwatch`."""

    threads: int
    runtime: str = DEFAULT_RUNTIME

    def times(self, group: FileGroup) -> np.ndarray:
        """Return the milliseconds of each file."""
        models, inputs = group.contents()
        clock = clock_for(self.threads, self.runtime)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timed.onnx"

            def opened(index: int) -> tuple[Session, Batch]:
                save_model(models[index], path)
                return open_session(path, threads=self.threads, runtime=self.runtime), inputs

            times, _ = _timed_as_memory_allows(
                opened,
                [clock] * len(models),
                runs=group.runs,
                warm_up=group.warm_up,
                settle=True,
                enough=_ENOUGH_OF_A_LAYER,
                largest=_LARGE_ARENA,
            )
        undisturbed: np.ndarray = np.percentile(times, _PERCENTILES[0], axis=0)
        return undisturbed
