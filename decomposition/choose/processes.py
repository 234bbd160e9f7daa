"""Apply a function to many jobs in several processes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


Spread = Callable[[Callable[[_Job], _Result], Iterable[_Job], str], Iterator[_Result]]
"""Does the work of `in_processes` in the caller's own way; takes the function, the jobs and a description."""

MOST_DEATHS = 2  # deaths over one job until the job is blamed: the first may be chance


class LostWorkerError(DecompositionError):
    """Every process that worked on a job died."""


@dataclass
class _Worker(Generic[_Job]):
    """A process and its current job, with that job's number."""

    process: BaseProcess
    number: int
    job: _Job
    deaths: int


class Processes(Generic[_Job, _Result]):
    """Processes that apply a function to jobs; jobs of those that die are done again."""

    def __init__(
        self, function: Callable[[_Job], _Result], size: int, work: str, *, threads: int = 1
    ) -> None:
        if size < 1:
            raise DecompositionError(f"{work} take 1 worker or more, got workers={size}")
        self.size = size
        self._function, self._work, self._threads = function, work, threads
        self._idle: list[tuple[Connection, BaseProcess]] = []

    def results(self, jobs: Iterable[_Job]) -> Iterator[tuple[int, _Result]]:
        """Yield the number of each job with its result, as they come."""
        rest = enumerate(jobs)
        busy: dict[Connection, _Worker[_Job]] = {}

        def start(number: int, job: _Job, deaths: int = 0) -> None:
            connection, process = self._idle.pop() if self._idle else self._started()
            busy[connection] = _Worker(process, number, job, deaths)
            with suppress(BrokenPipeError):  # it died; noticed when its result is awaited
                connection.send(job)

        try:
            for number, job in itertools.islice(rest, self.size):
                start(number, job)
            while busy:
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    worker = busy.pop(connection)
                    try:
                        result, error = connection.recv()
                    except (EOFError, ConnectionResetError):
                        connection.close()
                        self._check_deaths(worker)
                        start(worker.number, worker.job, worker.deaths + 1)
                        continue
                    self._idle.append((connection, worker.process))
                    if error is not None:
                        raise error
                    for number, job in itertools.islice(rest, 1):
                        start(number, job)
                    yield worker.number, result
        finally:
            _end((connection, worker.process) for connection, worker in busy.items())

    def close(self) -> None:
        """End the processes; later jobs start new ones."""
        _end(self._idle)
        self._idle = []

    def _started(self) -> tuple[Connection, BaseProcess]:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (self._function, theirs, self._threads)
        process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        # A process inherits ignored signals from its parent, so that Ctrl-C never reaches it.
        main_thread = threading.current_thread() is threading.main_thread()
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
        try:
            process.start()
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        theirs.close()
        return ours, process

    def _check_deaths(self, worker: _Worker[_Job]) -> None:
        """Log a worker's death; raise if other workers died over the same job before."""
        worker.process.join()
        code = worker.process.exitcode
        if worker.deaths >= MOST_DEATHS:
            raise LostWorkerError(
                f"a process for {self._work} ended with code {code} and no result; it may have run out of "
                "memory: use fewer workers"
            )
        log.warning("a process for %s ended with code %s; its work is done again", self._work, code)


def in_processes(
    function: Callable[[_Job], _Result], jobs: Iterable[_Job], workers: int, work: str, *, threads: int = 1
) -> Iterator[_Result]:
    """Yield a function's results on jobs as they come, computed without gradients; see `Processes`."""
    processes = Processes(partial(_without_gradients, function), workers, work, threads=threads)
    try:
        for _, result in processes.results(jobs):
            yield result
    finally:
        processes.close()


def _without_gradients(function: Callable[[_Job], _Result], job: _Job) -> _Result:
    with torch.no_grad():
        return function(job)


def _end(workers: Iterable[tuple[Connection, BaseProcess]]) -> None:
    for connection, process in workers:
        process.terminate()
        process.join()
        connection.close()


def _serve(function: Callable[[Any], Any], connection: Connection, threads: int) -> None:
    """Answer every job with its result or its exception, until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError):
        while True:
            job = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = (function(job), None)
            except Exception as error:  # raised again in the parent process
                error.add_note("".join(traceback.format_exc()))
                answer = (None, error)
            connection.send(answer)


def _end_with_parent() -> None:
    """End this process with its parent, which cannot end it when killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
