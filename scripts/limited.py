"""Limits of time and memory for work in this process."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self


class LimitError(Exception):
    """A limit was reached; the message says which."""


class Limits:
    """A block that may take so much processor time and memory.

    Processor time counts on a machine that is shared as on one that is not. Past the limit the block ends
    with an error as soon as it comes back from compiled code. Once it is left, `memory` is the most that it
    held at once beyond what the process held before, in MB.
    """

    memory: float

    def __init__(self, minutes: float, gigabytes: float) -> None:
        self._limit, self._gigabytes = minutes, gigabytes
        self._begun = self._held = 0.0
        self._before: tuple[tuple[int, int], tuple[int, int], Any] | None = None
        self._taken: float | None = None

    @property
    def minutes(self) -> float:
        """Minutes of processor time so far, or of the whole block once it is left."""
        return (time.process_time() - self._begun) / 60 if self._taken is None else self._taken

    def __enter__(self) -> Self:
        self._begun, self._held = time.process_time(), _start_peak()
        cpu, data = resource.getrlimit(resource.RLIMIT_CPU), resource.getrlimit(resource.RLIMIT_DATA)
        self._before = cpu, data, signal.signal(signal.SIGXCPU, self._end)
        resource.setrlimit(resource.RLIMIT_CPU, (int(self._begun + 60 * self._limit) + 1, cpu[1]))
        room = 1024 * _status("VmData") + int(1e9 * self._gigabytes)
        resource.setrlimit(resource.RLIMIT_DATA, (room, data[1]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken, self.memory = self.minutes, max(0.0, _peak() - self._held)
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_CPU, self._before[0])
            resource.setrlimit(resource.RLIMIT_DATA, self._before[1])
            signal.signal(signal.SIGXCPU, self._before[2])
        if isinstance(error, MemoryError):
            raise LimitError(f"not finished in {self._gigabytes:g} GB") from error

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        raise LimitError(f"not finished in {self._limit:g} minutes")


_STATUS, _MARKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _start_peak() -> float:
    """Let the kernel's figure of the most memory begin anew, where there is one; return it."""
    if _STATUS.is_file():
        _MARKS.write_text("5")
    return _peak()


def _peak() -> float:
    """Read the most memory that this process has held at once, in MB."""
    kilobytes = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 1000


def _status(name: str) -> int:
    """Read one of the kernel's figures of this process, in kB, or 0 where it tells none."""
    if not _STATUS.is_file():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
