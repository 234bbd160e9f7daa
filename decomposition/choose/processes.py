"""Do jobs in worker processes of this machine, or in workers elsewhere that have the same methods."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from joblib.externals.loky.backend.reduction import dumps
from joblib.externals.loky.process_executor import ProcessPoolExecutor

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

Spread = Callable[[Callable[[_Job], _Result], Iterable[_Job], str], Iterator[_Result]]
"""Does the work of `in_processes` in the caller's own way; takes the function, the jobs and a description."""

Build = Callable[[], Callable[[Any], Any]]
"""Builds the function that a worker applies to jobs."""

Lost = Callable[[str], Exception]
"""Makes the error of a job whose workers die, from the reason."""

MOST_DEATHS = 2
"""Deaths of workers over one job that are survived: the first may be chance."""


class Worker(Protocol):
    """Does one job at a time in another process."""

    def start(self) -> None:
        """Return when the worker can do jobs."""

    def apply(self, job: Any) -> Any:
        """Do a job, and again if the process dies."""

    def end(self) -> None:
        """End the process, whatever it does."""


class WorkerPool:
    """Workers that share out jobs; a thread waits for each of them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.size, self._workers = len(workers), workers
        self._free = SimpleQueue[Worker | Exception]()
        # Workers of a cluster without room for all start late or never, and the others do their jobs.
        self._threads = ThreadPoolExecutor(2 * self.size, initializer=_block_interrupts)
        for worker in workers:
            self._threads.submit(self._start, worker)

    def finished(self, jobs: Iterable[Any]) -> Iterator[tuple[int, Future[Any]]]:
        """Yield the numbers and results of jobs, in the order in which they end.

        A job is made when a worker is free for it, so memory holds no more jobs than workers.
        """
        rest = enumerate(jobs)
        running: dict[Future[Any], int] = {}

        def fill() -> None:
            for number, job in itertools.islice(rest, self.size - len(running)):
                running[self._threads.submit(self._apply, job)] = number

        fill()
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                number = running.pop(future)
                fill()
                yield number, future

    def results(self, jobs: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of jobs in the order of completion; the workers end with the iteration."""
        with closing(self):
            for _, future in self.finished(jobs):
                yield future.result()

    def map(self, jobs: Iterable[Any]) -> list[Any]:
        """Return the results of jobs, in the order of the jobs."""
        found = {number: future.result() for number, future in self.finished(jobs)}
        return [found[number] for number in range(len(found))]

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown()

    def _start(self, worker: Worker) -> None:
        try:
            worker.start()
        except Exception as error:  # raised where its first job is asked for
            self._free.put(error)
        else:
            self._free.put(worker)

    def _apply(self, job: Any) -> Any:
        worker = self._free.get()
        try:
            if isinstance(worker, Exception):
                raise worker
            return worker.apply(job)
        finally:
            self._free.put(worker)


class LocalWorker:
    """A process of this machine.

    It ignores Ctrl-C, which the main process handles, and ends when that does, however it ends.
    """

    def __init__(self, build: Path, *, threads: int, deaths: int, lost: Lost) -> None:
        self._build = build
        self._begin = (build, threads, os.getpid())
        self._deaths, self._lost, self._busy = deaths, lost, False
        self._executor = self._new_executor()

    def start(self) -> None:
        """Start the process; its first job waits until it is up."""
        self._executor.submit(_ready)

    def apply(self, job: Any) -> Any:
        """Do a job, in a new process if that dies."""
        self._busy = True
        try:
            for left in reversed(range(self._deaths + 1)):
                try:
                    return self._executor.submit(_apply, job).result()
                except BrokenProcessPool as error:
                    reason = _reason(error)
                    self._executor = self._new_executor()
                    if left == 0:
                        raise self._lost(reason) from error
                    log.warning("a worker process died (%s); its work is done again", reason)
        finally:
            self._busy = False

    def end(self) -> None:
        """End the process; a busy one is killed."""
        self._executor.shutdown(kill_workers=self._busy)
        self._build.unlink(missing_ok=True)

    def _new_executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, initializer=_begin, initargs=self._begin)


def local_pool(
    build: Build, size: int, *, threads: int = 1, deaths: int = MOST_DEATHS, lost: Lost
) -> WorkerPool:
    """Return processes of this machine that build a function once, and apply it to their jobs."""
    pickled = dumps(build)
    # In a file: loky waits forever for a process that dies while it is sent more than a pipe holds.
    with tempfile.NamedTemporaryFile(prefix="rankrl-worker-", delete=False) as file:
        file.write(pickled)
    path = Path(file.name)
    return WorkerPool([LocalWorker(path, threads=threads, deaths=deaths, lost=lost) for _ in range(size)])


def in_processes(
    function: Callable[[_Job], _Result], jobs: Iterable[_Job], workers: int, work: str, *, threads: int = 1
) -> Iterator[_Result]:
    """Yield the results of a function on jobs, in the order of completion; it computes no gradients."""
    if workers < 1:
        raise DecompositionError(f"{work} take 1 worker or more, got workers={workers}")

    def lost(reason: str) -> Exception:
        advice = "it may have run out of memory: use fewer workers"
        return DecompositionError(f"a process for {work} died ({reason}); {advice}")

    build = partial(without_gradients, function)
    yield from local_pool(build, workers, threads=threads, lost=lost).results(jobs)


def without_gradients(function: Callable[[_Job], _Result]) -> Callable[[_Job], _Result]:
    """Return the function as one that computes no gradients."""
    return torch.no_grad()(function)


class _Process:
    """The state of a worker process."""

    build: Path
    function: Callable[[Any], Any] | None = None


def _block_interrupts() -> None:
    """Keep Ctrl-C from the processes that this thread starts, also before they can ignore it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _begin(build: Path, threads: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _Process.build = build


def _end_with(parent: int) -> None:
    """End this process with its parent, which cannot end it when killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _ready() -> None:
    """Do nothing; the first task makes an executor start its process."""


def _apply(job: Any) -> Any:
    # Built here rather than at the start of the process, so that exceptions reach the caller.
    if _Process.function is None:
        _Process.function = pickle.loads(_Process.build.read_bytes())()
    return _Process.function(job)


def _reason(error: Exception) -> str:
    """Return the signal or exit code from an executor's message of several lines, else its first sentence."""
    code = re.search(r"exit codes of the workers are \{(.+)\}", str(error))
    return code[1] if code else str(error).partition(".")[0]
