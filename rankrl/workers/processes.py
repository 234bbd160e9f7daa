"""Define pools of workers, and run them as processes on this machine.

A worker gets one function that builds a scorer, calls it once, and then applies the scorer to one task after
the other.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from decomposition.choose.processes import in_processes
from rankrl.device import reuse_memory
from rankrl.errors import ConfigError, RankrlError
from rankrl.options.search import Cluster, check_workers

Scorer = Callable[[Any], Any]
Builder = Callable[[], Scorer]

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""Deaths of workers over the same work that are survived; one more ends the search."""
GO_ON = "What was scored so far is saved; resume the run, with a smaller search.workers if memory ran out"


class WorkerError(RankrlError):
    """A worker process died or could not be reached."""


class WorkerPool(Protocol):
    """Processes that apply a scorer to tasks."""

    size: int

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks."""

    def close(self) -> None:
        """End the processes."""


class LocalWorkers:
    """Processes on this machine, started by the first tasks; they ignore Ctrl-C and end with the main one.

    Where one dies, all are started anew, and only unfinished tasks are done again.
    """

    def __init__(self, build: Builder, size: int, *, threads: int = 1) -> None:
        self.size, self._threads = size, threads
        try:
            self._build = pickle.dumps(build)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"search.workers={size}: the network or its score cannot be sent to processes ({error}). "
                "Define both at the top level of a module that can be imported, or leave out the workers"
            ) from error
        self._executor: ProcessPoolExecutor | None = None

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks; see `WorkerPool`."""
        results: dict[int, Any] = {}
        for deaths in range(MOST_DEATHS + 1):
            futures: dict[int, Future[Any]] = {}
            try:
                if self._executor is None:
                    self._executor = self._start()
                for index, task in enumerate(tasks):
                    if index not in results:
                        futures[index] = self._executor.submit(_apply, task)
                for index, future in futures.items():
                    results[index] = future.result()
                return [results[index] for index in range(len(tasks))]
            except BrokenProcessPool as error:
                results.update(
                    {index: future.result() for index, future in futures.items() if _succeeded(future)}
                )
                self.close()
                if deaths == MOST_DEATHS:
                    raise WorkerError(f"one of {self.size} worker processes died. {GO_ON}") from error
                log.warning("a worker process died; what it had not finished is done again")
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the processes; later tasks start new ones."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _start(self) -> ProcessPoolExecutor:
        executor = ProcessPoolExecutor(
            self.size,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(self._build, self._threads),
        )
        # A process inherits ignored signals from its parent, so that Ctrl-C never reaches it.
        main_thread = threading.current_thread() is threading.main_thread()
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
        try:
            for _ in range(self.size):
                executor.submit(_ready)
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        return executor


@dataclass(frozen=True)
class Workers:
    """The number of worker processes, where they run, and the resources of each."""

    size: int
    cluster: Cluster = "local"
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_workers(self.size, self.cluster, self.cpus, self.gpus)


class WorkerCluster(Protocol):
    """A place where workers run, one pool at a time."""

    workers: Workers

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        """Yield the results of a function on jobs, in the order in which they are finished."""

    def pool(self, build: Builder) -> WorkerPool:
        """Return workers that apply the scorer of `build`; see `LocalWorkers` for its errors."""

    def close(self) -> None:
        """End the workers."""


class LocalCluster:
    """Processes on this machine, started for each work."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        """Yield the results of a function on jobs; see `WorkerCluster`."""
        return in_processes(function, jobs, self.workers.size, work, threads=self.workers.cpus)

    def pool(self, build: Builder) -> WorkerPool:
        """Return processes that apply the scorer of `build`."""
        return LocalWorkers(build, self.workers.size, threads=self.workers.cpus)

    def close(self) -> None:
        """Do nothing: processes end with their work."""


class _Process:
    """The state of a local worker process."""

    build: bytes = b""
    scorer: Scorer | None = None


def _begin(build: bytes, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    reuse_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Process.build = build


def _end_with_parent() -> None:
    """End this worker with its main process, which cannot end it when killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Do nothing; as the first task it makes the executor start a process."""


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _apply(task: Any) -> Any:
    # Built here rather than at the start of the process, so that exceptions reach the caller.
    if _Process.scorer is None:
        _Process.scorer = pickle.loads(_Process.build)()
    return _Process.scorer(task)
