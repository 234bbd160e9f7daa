"""Report progress by a bar on a terminal, estimates in the log elsewhere, or the caller's function."""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None] | Literal[False] | None
"""Where progress goes: None draws a bar on a terminal, False shows nothing, and a function is called with
the stage, the number of its finished steps and the number of all its steps."""

# In seconds: time before the first estimate; without a terminal it is doubled for each further one, up to
# the largest interval between two, and there is a least remaining time that is worth a line.
_FIRST_ESTIMATE = 10.0
_LONGEST_SILENCE = 600.0
_WORTH_SAYING = 60.0
_CACHED = 0.1  # of the slowest pace: faster stages were read from a cache and tell nothing of others
_UNKNOWN = 100.0  # what stages of unknown cost count for in the length of the bar
_call: _Call | None = None
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


@dataclass
class _Stage:
    """Work of one kind: its cost before it is measured (None if unknown), seconds spent, and steps done."""

    cost: float | None
    seconds: float = 0.0
    before: int = 0  # steps that an earlier, interrupted call had done
    completed: int = 0
    total: int = 1
    over: bool = False

    def update(self, completed: int, total: int) -> bool:
        """Set the finished steps; tell whether they are counted anew."""
        resumed = self.completed == 0 and completed > 1  # a resumed run starts with finished steps
        anew = resumed or completed < self.completed  # or the count restarted
        if anew:
            self.before, self.seconds = completed, 0.0
        self.completed, self.total, self.over = completed, total, False
        return anew

    @property
    def share(self) -> float:
        """The finished share of the stage."""
        return 1.0 if self.over else self.completed / max(1, self.total)

    @property
    def left(self) -> float | None:
        """Seconds left by the steps so far; None before the first one."""
        if self.over:
            return 0.0
        done = self.completed - self.before
        return self.seconds / done * (self.total - self.completed) if done > 0 else None


class _Call:
    """The stages of a call, one of which runs at a time; what lies between two belongs to the first."""

    def __init__(self, costs: Mapping[str, float | None], progress: Progress, show: _Show) -> None:
        self.stages = {name: _Stage(cost) for name, cost in costs.items()}
        self.progress, self._show = progress, show
        self.bars = 0  # that are open; those within another are not shown
        self.running = ""
        self._now = self._start = time.monotonic()
        self._due = self._start + _FIRST_ESTIMATE

    def begin(self, bar: ProgressBar) -> None:
        """Begin the stage of a bar; those before it are over, whether they were needed or not."""
        self._pass()
        if bar.description in self.stages:
            names = list(self.stages)
            for number, stage in enumerate(self.stages.values()):
                stage.over |= number < names.index(bar.description)
            self.running = bar.description
            self.stages[self.running].over = False
        if self.progress is None:
            self._show(self, bar, None)

    def update(self, bar: ProgressBar, best: float | None) -> None:
        """Show the steps of a bar."""
        self._pass()
        stage = self.stages.get(bar.description) or _Stage(None)
        if stage.update(bar.completed, bar.total):
            self._start, self._due = self._now, self._now + _FIRST_ESTIMATE
        self._show(self, bar, best)

    def _pass(self) -> None:
        now = time.monotonic()
        if self.running in self.stages:
            self.stages[self.running].seconds += now - self._now
        self._now = now

    @property
    def share(self) -> float:
        """The finished share of the expected work."""
        costs = [_UNKNOWN if stage.cost is None else stage.cost for stage in self.stages.values()]
        done = sum(cost * stage.share for cost, stage in zip(costs, self.stages.values(), strict=True))
        return done / sum(costs)

    @property
    def left(self) -> float | None:
        """Seconds left, those of later stages by the pace so far; None while too little is known of it."""
        begun = [stage for stage in self.stages.values() if stage.left is not None]
        later = [stage for stage in self.stages.values() if stage.left is None]
        ahead = sum(math.inf if stage.cost is None else stage.cost for stage in later)
        left = sum(stage.left or 0.0 for stage in begun)
        if not later:
            return left
        spent = [(stage.seconds + (stage.left or 0.0), stage.cost) for stage in begun if stage.cost]
        slowest = max((seconds / cost for seconds, cost in spent), default=0.0)
        measured = [(seconds, cost) for seconds, cost in spent if seconds > _CACHED * slowest * cost]
        seconds, known = sum(each for each, _ in measured), sum(cost for _, cost in measured)
        return left + ahead * seconds / known if known > ahead and seconds >= _FIRST_ESTIMATE else None

    def log(self, bar: ProgressBar, best: float | None) -> None:
        """Log, at growing intervals, the finished steps of the stage and the time left of the call."""
        del best
        left = self.left
        if self._now < self._due or bar.completed < 1 or (left is None and len(self.stages) == 1):
            return
        self._due = self._now + min(self._now - self._start, _LONGEST_SILENCE)
        at = f"{bar.description}: {bar.completed} of {bar.total}"
        if left is None:
            log.info(at)
        elif left >= _WORTH_SAYING:
            log.info("%s, about %s left%s", at, in_words(left), " in all" if len(self.stages) > 1 else "")


_Show = Callable[[_Call, "ProgressBar", float | None], None]


class ProgressBar:
    """A running progress bar, made by `progress_bar`."""

    def __init__(
        self, description: str, total: int, show: Callable[[ProgressBar, float | None], None]
    ) -> None:
        self.description, self.total = description, total
        self.completed = 0
        self._show = show

    def advance(self, steps: int = 1, *, best: float | None = None) -> None:
        """Advance by `steps`, and show `best`, if given, as the best value so far."""
        self.update(self.completed + steps, best=best)

    def update(self, completed: int, *, best: float | None = None) -> None:
        """Set the number of finished steps, for callers that know the total and not the difference."""
        self.completed = completed
        self._show(self, best)
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
def whole_call(
    stages: Mapping[str, float | None], *, progress: Progress = None, console: Console | None = None
) -> Iterator[None]:
    """Show the bars of the block as one, with the time left of all stages.

    Stages are descriptions of bars, in order, with their relative costs, None for one that others tell
    nothing of. The time left is shown once the stages of at least half of the costs have been measured.
    """
    global _call
    if _call is not None:
        yield
        return
    try:
        with _shown(console) if progress is None else nullcontext(_Call.log) as show:
            _call = _Call(stages, progress, show)
            yield
    finally:
        _call = None


@contextmanager
def progress_bar(
    description: str, total: int, *, progress: Progress = None, console: Console | None = None
) -> Iterator[ProgressBar]:
    """Show progress while the block runs: a bar on a terminal, unless nested, else estimates in the log."""
    if _call is None:
        only = whole_call({description: None}, progress=progress, console=console)
        with only, progress_bar(description, total) as bar:
            yield bar
        return
    call, shown = _call, not _call.bars
    told = progress if progress is not None or not shown else call.progress

    def show(bar: ProgressBar, best: float | None) -> None:
        if told:
            told(bar.description, bar.completed, bar.total)
        elif told is None and shown:
            call.update(bar, best)

    bar = ProgressBar(description, total, show)
    if shown:
        call.begin(bar)
    call.bars += 1
    try:
        yield bar
    finally:
        call.bars -= 1


@contextmanager
def _shown(console: Console | None) -> Iterator[_Show]:
    """Yield what shows steps: a bar on a terminal, else estimates in the log."""
    alone = multiprocessing.current_process().name == "MainProcess"  # parallel bars overwrite another
    if not (alone and sys.stdout.isatty() if console is None else console.is_terminal):
        yield _Call.log
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    texts = [TextColumn(f"{{task.fields[{name}]}}") for name in ("steps", "best", "left")]
    columns = [TextColumn("{task.description}"), BarColumn(), *texts[:2], TimeElapsedColumn(), texts[2]]
    with Progress(*columns, console=console, refresh_per_second=2) as drawn:  # while times are measured
        task = drawn.add_task("prepare", total=1.0, steps="", best="", left="")

        def show(call: _Call, bar: ProgressBar, best: float | None) -> None:
            left = call.left
            told: dict[str, Any] = {"left": "" if left is None else f"{timedelta(seconds=round(left))} left"}
            told |= {"description": bar.description, "steps": f"{bar.completed}/{bar.total}"}
            if best is not None:
                told["best"] = f"best {best:.4f}"
            drawn.update(task, completed=call.share, **told)

        yield show


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
