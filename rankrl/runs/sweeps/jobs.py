"""Run the jobs of a sweep, a GPU each and finished ones reused; record failures and show the progress."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from decomposition.progress import in_words, listening
from rankrl.errors import StorageError, counted
from rankrl.files import read_object, write_json
from rankrl.runs.run_folder import LOCK_FILE, RunFolder, digest, locked

log = logging.getLogger(__name__)

ERROR_FILE = "error.json"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Failure:
    folder: Path
    error: str


def write_failure(
    folder: Path, error: BaseException, paragraph: str, overrides: Sequence[str], sweep: str | None
) -> None:
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
    finished: int
    failed: int
    running: Sequence[str]

    @classmethod
    def of(cls, sweep_folder: Path) -> SweepState:
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
        return self.finished + self.failed

    def line(self, total: int | None, left: float | None) -> str:
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


VISIBLE = "CUDA_VISIBLE_DEVICES"


def runs_in_pool() -> bool:
    """Tell whether this process is one of a pool's workers."""
    return multiprocessing.current_process().name != "MainProcess"


def worker_number(job: int) -> int:
    """Return the number of this worker in its pool, from 0; the number of the job without a pool.

    A pool's worker keeps the first GPU that it has used, so GPUs are assigned to workers there.
    """
    number = re.search(r"-(\d+)$", multiprocessing.current_process().name)
    return job if number is None else int(number[1]) - 1


def take_one_gpu(job: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Restrict this process to one GPU, by the number of its worker or job.

    The choice of a cluster's scheduler (one device in CUDA_VISIBLE_DEVICES, or none) is kept. Call it before
    anything uses a GPU.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        import torch  # late, as the command line handles sweeps without torch

        devices = [str(index) for index in range(torch.cuda.device_count())]
    else:
        devices = [name for name in visible.split(",") if name.strip()]
    if len(devices) > 1:
        environment[VISIBLE] = devices[worker_number(job) % len(devices)]


def job_folder(folder: RunFolder, config: Mapping[str, Any], sweep_folder: Path) -> RunFolder:
    """Return the folder of a job, with earlier results of the same job moved or copied into it.

    Elsewhere in the sweep's folder it is renamed if the new name is longer; below `reuse` a finished one is
    copied.
    """
    own, sweep = digest(config), sweep_identifier(sweep_folder)
    known = _known_jobs(sweep_folder, sweep).get(own, folder)
    if known != folder and known.path.is_dir():
        if folder.holds_results or len(known.path.name) >= len(folder.path.name):
            folder.discard()
            return known
        with locked(known.path), locked(folder.path):
            log.info("%s was %s in an earlier command", folder.path, known.path.name)
            _hand_over(known.path, folder.path, os.replace)
        shutil.rmtree(known.path)
    elif config.get("reuse") and not folder.holds_results:
        known = _known_jobs(Path(config["reuse"]), sweep).get(own, folder)
        if known.finished:
            with locked(folder.path):
                log.info("%s is copied from %s", folder.path, known.path)
                _hand_over(known.path, folder.path, _copy)
    return folder


def _hand_over(source: Path, target: Path, hand_over: Callable[[Path, Path], object]) -> None:
    """Move or copy a run, `metrics.json` last, so that an interruption leaves an unfinished run."""
    mark = RunFolder(source).metrics
    for path in sorted(source.iterdir(), key=lambda path: path == mark):
        place = target / path.name
        if path.name == LOCK_FILE:
            continue
        if place.is_dir():
            shutil.rmtree(place)
        with suppress(PermissionError):  # Windows does not move an open log
            hand_over(path, place)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


@lru_cache(maxsize=4)
def _known_jobs(folder: Path, sweep: str | None) -> dict[str, RunFolder]:
    """Return the runs below a folder at the start of a sweep, by the digest of their configurations."""
    del sweep  # only a key of the cache, so that another sweep reads the jobs anew
    runs = sorted(RunFolder.below(folder), key=lambda run: run.finished)
    recorded = [(run, run.recorded()) for run in runs]
    return {digest(config): run for run, config in recorded if config is not None}


def run_sweep_job(
    run: Callable[[RunFolder], object],
    folder: RunFolder,
    *,
    number: int,
    config: Mapping[str, Any],
    overrides: Sequence[str],
    choices: Sequence[str],
    record: Callable[[RunFolder], object],
    sweep_folder: Path,
    explain: Callable[[Exception], str],
) -> None:
    """Run a job unless its results exist; write a failure to `error.json`."""
    try:
        folder = job_folder(folder, config, sweep_folder)
        with folder.held():
            folder.prepare()
            folder.error.unlink(missing_ok=True)
            if config.get("overwrite"):
                folder.replace(config)
                folder.prepare()
            folder.check(config)
            folder.claim(config, overrides, choices)
            if folder.finished:
                log.info("finished already: %s", folder.path)
                return
            record(folder)
            if runs_in_pool():
                take_one_gpu(number)
            with listening(JobProgress(folder)):
                run(folder)
    except Exception as error:  # of any kind, as the other jobs go on; the file holds the traceback
        folder.bring_back()
        paragraph = " ".join(explain(error).split())
        print(f"rankrl: {folder.path}: {paragraph}", file=sys.stderr)
        write_failure(folder.path, error, paragraph, overrides, sweep_identifier(sweep_folder))
