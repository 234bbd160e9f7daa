"""Timed forward passes.

With one thread the runtimes of the CPU work in the calling thread, and what is measured is that thread's
processor time: time that others spend on the core does not count. With several threads, or on a GPU, it is
wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from rankrl.device import processor_name
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, Session, get_runtime

Clock = Literal["processor", "wall"]
Times = np.ndarray[Any, np.dtype[np.float64]]
"""Milliseconds."""

_FINE_CLOCK = 1e-6  # seconds; the processor time of some systems moves in steps of 16 ms


def timed_passes(
    sessions: Sequence[Session],
    batches: Sequence[Batch],
    clocks: Sequence[Clock],
    *,
    runs: int,
    warm_up: int,
    settle: bool = False,
) -> tuple[Times, Times]:
    """Time open files in turns (A B C, C B A, ...)."""
    for session, batch in zip(sessions, batches, strict=True):
        for _ in range(warm_up):
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
    """Return all that times depend on apart from the layers, for the reader and for keys."""
    return (
        f"{runtime} {get_runtime(runtime).version}, batch {batch}, threads {threads}, {processor_name()}, "
        f"ms of {clock_for(threads, runtime)} time"
    )
