"""Report progress by a bar on a terminal, estimates in the log elsewhere, or the caller's function."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None] | Literal[False] | None
"""Where progress goes: None draws a bar on a terminal, False shows nothing, and a function is called with
what is being done, the number of finished steps and the number of all steps."""

# Without a terminal, in seconds: time before the first estimate (doubled for each further one), largest
# interval between two, and least remaining time that is worth a line.
_FIRST_ESTIMATE = 10.0
_LONGEST_SILENCE = 600.0
_WORTH_SAYING = 60.0
_drawing = False
_listeners: list[Callable[[str, int, int], None]] = []


class Deadline:
    """The end of a call that is bounded in seconds from its beginning; without a number there is none."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self.stopped = seconds, False
        self._begun = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._begun

    def over(self) -> bool:
        """Tell a stage that could go on whether to stop; `stopped` keeps that one was told so."""
        self.stopped = self.stopped or (self.seconds is not None and self.elapsed >= self.seconds)
        return self.stopped


class ProgressBar:
    """A running progress bar, made by `progress_bar`."""

    def __init__(self, description: str, total: int, show: Callable[[int, float | None], None]) -> None:
        self.description, self.total = description, total
        self.completed = 0
        self._show = show

    def advance(self, steps: int = 1, *, best: float | None = None) -> None:
        """Advance by `steps`, and show `best`, if given, as the best value so far."""
        self.update(self.completed + steps, best=best)

    def update(self, completed: int, *, best: float | None = None) -> None:
        """Set the number of finished steps, for callers that know the total and not the difference."""
        self.completed = completed
        self._show(completed, best)
        for listener in _listeners:
            listener(self.description, completed, self.total)


@contextmanager
def listening(listener: Callable[[str, int, int], None]) -> Iterator[None]:
    """Call a function with every step of progress in the block, besides showing it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def progress_bar(
    description: str, total: int, *, progress: Progress = None, console: Console | None = None
) -> Iterator[ProgressBar]:
    """Show progress while the block runs: a bar on a terminal, unless nested, else estimates in the log."""
    global _drawing
    if progress is not None:
        tell = progress or (lambda *_: None)
        yield ProgressBar(description, total, lambda completed, best: tell(description, completed, total))
        return
    alone = multiprocessing.current_process().name == "MainProcess"  # parallel bars overwrite another
    visible = alone and sys.stdout.isatty() if console is None else console.is_terminal
    if not visible:
        yield ProgressBar(description, total, _Estimates(description, total).show)
    elif _drawing:
        yield ProgressBar(description, total, lambda completed, best: None)
    else:
        _drawing = True
        try:
            with _drawn(description, total, console) as bar:
                yield bar
        finally:
            _drawing = False


@contextmanager
def _drawn(description: str, total: int, console: Console | None) -> Iterator[ProgressBar]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    drawn = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    with drawn:
        task = drawn.add_task(description, total=total, best="")

        def show(completed: int, best: float | None) -> None:
            drawn.update(task, completed=completed)
            if best is not None:
                drawn.update(task, best=f"best {best:.4f}")

        yield ProgressBar(description, total, show)


class _Estimates:
    """Logs, at growing intervals, the finished share of the work and the estimated time left."""

    def __init__(self, description: str, total: int) -> None:
        self.description, self.total = description, total
        self.start, self.due = time.monotonic(), _FIRST_ESTIMATE
        self.before = self.last = 0

    def show(self, completed: int, best: float | None) -> None:
        del best
        resumed = self.last == 0 and completed > 1  # a resumed run starts with finished steps
        if resumed or completed < self.last:  # or the count restarted
            self.before, self.start, self.due = completed, time.monotonic(), _FIRST_ESTIMATE
        self.last = completed
        spent, done = time.monotonic() - self.start, completed - self.before
        if spent < self.due or done < 1:
            return
        left = spent / done * (self.total - completed)
        self.due = spent + min(spent, _LONGEST_SILENCE)
        if left >= _WORTH_SAYING:
            log.info("%s: %d of %d, about %s left", self.description, completed, self.total, in_words(left))


def in_words(seconds: float) -> str:
    """Return a duration as "40 s", "12 min" or "2 h 30 min"."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def logged_seconds(log: logging.Logger, what: str) -> Iterator[None]:
    """Log how long a block took, once it has ended."""
    start = time.perf_counter()
    yield
    log.info("%s: %.1f s", what, time.perf_counter() - start)
