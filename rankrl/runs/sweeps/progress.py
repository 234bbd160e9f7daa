"""Record the failures and the progress of a sweep's jobs in their folders, and show the sweep's state."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from decomposition.progress import in_words
from rankrl.errors import StorageError, counted
from rankrl.files import read_object, write_json
from rankrl.runs.run_folder import RunFolder

log = logging.getLogger(__name__)

ERROR_FILE = "error.json"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Failure:
    """A job that ended with an error."""

    folder: Path
    error: str


def write_failure(
    folder: Path, error: BaseException, paragraph: str, overrides: Sequence[str], sweep: str | None
) -> None:
    """Write `error.json`."""
    content = {
        "error": paragraph,
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "overrides": list(overrides),
        "sweep": sweep,
    }
    write_json(folder / ERROR_FILE, content)


def sweep_identifier(sweep_folder: Path) -> str | None:
    """Return the identifier of the last sweep started in a folder, or None without one."""
    known = read_object(sweep_folder / SWEEP_FILE).get("id")
    return None if known is None else str(known)


def failures(sweep_folder: Path) -> list[Failure]:
    """Return the failed jobs of the last sweep started in a folder, sorted by folder name."""
    sweep = sweep_identifier(sweep_folder)
    read = {path: read_object(path) for path in sorted(sweep_folder.rglob(ERROR_FILE))}
    return [
        Failure(path.parent, str(content.get("error", f"{path} cannot be read")))
        for path, content in read.items()
        if sweep is None or content.get("sweep", sweep) == sweep
    ]


_TOLD_EVERY = 2.0  # seconds; file systems of clusters are slow
_SHOWN_EVERY = 2.0  # seconds; jobs report no more often
_LOGGED_EVERY = 30.0  # seconds; each line stays in the log
_FORGOTTEN_AFTER = 600.0  # seconds without a report, after which a job does not count as running
_MOST_NAMED = 4


class JobProgress:
    """Write a job's progress into its folder, at most every two seconds, as a listener of progress bars."""

    def __init__(self, folder: RunFolder) -> None:
        self._path, self._due = folder.progress, 0.0

    def __call__(self, stage: str, completed: int, total: int) -> None:
        """Write the step, unless another was written less than two seconds ago."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _TOLD_EVERY
        try:
            write_json(self._path, {"stage": stage, "completed": completed, "total": total})
        except StorageError:
            log.debug("progress cannot be written to %s", self._path)  # the job's own writes will report it


@dataclass(frozen=True)
class SweepState:
    """The progress of a sweep."""

    finished: int
    failed: int
    running: Sequence[str]

    @classmethod
    def of(cls, sweep_folder: Path) -> SweepState:
        """Read the state from the folders of the jobs."""
        failed = {failure.folder for failure in failures(sweep_folder)}
        finished, running = 0, []
        for folder in RunFolder.below(sweep_folder):
            if folder.path in failed:
                continue
            if folder.finished:
                finished += 1
                continue
            spoken, words = _last_words(folder)
            if time.time() - spoken < _FORGOTTEN_AFTER:
                running.append((spoken, f"{folder.path.relative_to(sweep_folder)}{words}"))
        return cls(finished, len(failed), [words for _, words in sorted(running, reverse=True)])

    @property
    def ended(self) -> int:
        """Jobs that are finished or have failed."""
        return self.finished + self.failed

    def line(self, total: int | None, left: float | None) -> str:
        """Format the state in one line."""
        if total is None:
            done = counted(self.finished, "job")
        else:
            jobs = max(total, self.ended + len(self.running))
            done = f"{self.finished} of {counted(jobs, 'job')}"
        parts = [f"{done} finished"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.running:
            named = ", ".join(self.running[:_MOST_NAMED])
            more = "" if len(self.running) <= _MOST_NAMED else ", ..."
            parts.append(f"{len(self.running)} running ({named}{more})")
        if left is not None:
            parts.append(f"about {in_words(left)} left")
        return "; ".join(parts)


class SweepWatch:
    """Shows the progress of a sweep from a thread, while its jobs run in other processes."""

    def __init__(
        self, folder: Path, total: int | None, *, live: bool, console: Console | None = None
    ) -> None:
        self._folder, self._total = folder, total
        self._console = console or Console()
        self._live = live and (self._console.is_terminal if console else sys.stdout.isatty())
        self._begin = time.monotonic()
        self._before = SweepState.of(folder).ended
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and keep the last line on the terminal."""
        self._ended.set()
        self._thread.join()

    def line(self) -> str:
        """Return the current progress in one line."""
        state = SweepState.of(self._folder)
        done, left = state.ended - self._before, None
        rest = 0 if self._total is None else self._total - state.ended
        if rest > 0 and done > 0:
            left = (time.monotonic() - self._begin) / done * rest
        return f"sweep: {state.line(self._total, left)}"

    def _watch(self) -> None:
        if not self._live:
            last = None
            while not self._ended.wait(_LOGGED_EVERY):
                line = self.line()
                if line != last:
                    log.info(line)
                last = line
            return
        with Live(Text(self.line()), console=self._console, auto_refresh=False, transient=True) as live:
            while not self._ended.wait(_SHOWN_EVERY):
                live.update(Text(self.line()), refresh=True)


def _last_words(folder: RunFolder) -> tuple[float, str]:
    """Return time and text of a job's last progress report."""
    report = read_object(folder.progress)
    is_known = report.keys() >= {"stage", "completed", "total"}
    words = ": {stage} {completed} of {total}".format(**report) if is_known else ""
    try:
        return (folder.progress if is_known else folder.record).stat().st_mtime, words
    except OSError:
        return 0.0, ""
