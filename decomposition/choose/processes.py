"""Run one function on many jobs in several processes."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
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

_MOST_DEATHS = 2  # deaths over one job until the job is blamed: the first may be chance


@dataclass
class _Worker(Generic[_Job]):
    """A worker process and its current job."""

    process: BaseProcess
    job: _Job
    deaths: int = 0


def in_processes(
    function: Callable[[_Job], _Result], jobs: Iterable[_Job], workers: int, work: str, *, threads: int = 1
) -> Iterator[_Result]:
    """Yield a function's results on jobs as they come; jobs of workers that die are redone."""
    if workers < 1:
        raise DecompositionError(f"{work} take 1 worker or more, got workers={workers}")
    rest = iter(jobs)
    idle: list[tuple[Connection, BaseProcess]] = []
    busy: dict[Connection, _Worker[_Job]] = {}

    def start(job: _Job, deaths: int = 0) -> None:
        connection, process = idle.pop() if idle else _started(function, threads)
        busy[connection] = _Worker(process, job, deaths)
        with suppress(BrokenPipeError):  # it died; noticed when its result is awaited
            connection.send(job)

    try:
        for job in itertools.islice(rest, workers):
            start(job)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker = busy.pop(connection)
                try:
                    result, error = connection.recv()
                except (EOFError, ConnectionResetError):
                    connection.close()
                    _check_deaths(worker, work)
                    start(worker.job, worker.deaths + 1)
                    continue
                idle.append((connection, worker.process))
                if error is not None:
                    raise error
                for job in itertools.islice(rest, 1):
                    start(job)
                yield result
    finally:
        for connection, process in (*idle, *((pipe, worker.process) for pipe, worker in busy.items())):
            process.terminate()
            process.join()
            connection.close()


def _started(function: Callable[[Any], Any], threads: int) -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_serve, args=(function, theirs, threads), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _check_deaths(worker: _Worker[Any], work: str) -> None:
    """Log a worker's death; raise if other workers died over the same job before."""
    worker.process.join()
    code = worker.process.exitcode
    if worker.deaths >= _MOST_DEATHS:
        raise DecompositionError(
            f"a process for {work} ended with code {code} and no result; it may have run out of memory: use "
            "fewer workers"
        )
    log.warning("a process for %s ended with code %s; its work is done again", work, code)


def _serve(function: Callable[[Any], Any], connection: Connection, threads: int) -> None:
    """Answer every job with its result or its exception, until the other side closes."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    try:
        while True:
            job = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = (function(job), None)
            except Exception as error:  # raised again in the parent process
                error.add_note("".join(traceback.format_exc()))
                answer = (None, error)
            connection.send(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
