"""The same function on many jobs, in processes of their own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from decomposition.errors import DecompositionError

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def in_processes(
    function: Callable[[_Job], _Result], jobs: Iterable[_Job], workers: int, work: str
) -> Iterator[_Result]:
    """Yield the results of a function on jobs, in the order in which they are finished.

    A job is made when a worker is free for it, so memory holds no more jobs than workers. All workers end
    with the iteration, whatever ends it.

    Args:
        function: A function of a module; it, jobs and results are pickled.
        jobs: What it is called with.
        workers: Processes, 1 or more, each computing in one thread.
        work: What is done, for messages.

    Raises:
        DecompositionError: If `workers` is less than 1, or a worker ends without a result.
        Exception: What the function raises.
    """
    if workers < 1:
        raise DecompositionError(f"{work} take 1 worker or more, got workers={workers}")
    context = get_context("spawn")
    rest = iter(jobs)
    running: dict[Connection, BaseProcess] = {}
    try:
        for job in rest:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = process
            ours.send(job)
            if len(running) == workers:
                break
        busy = set(running)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                result = _received(connection, running[connection], work)
                job_left = next(rest, None)
                if job_left is None:
                    busy.discard(connection)
                else:
                    connection.send(job_left)
                yield result
    finally:
        for connection, process in running.items():
            process.terminate()
            process.join()
            connection.close()


def _received(connection: Connection, process: BaseProcess, work: str) -> Any:
    try:
        result, error = connection.recv()
    except EOFError:
        process.join()
        raise DecompositionError(
            f"a process for {work} ended with code {process.exitcode} and no result; it may have run out of "
            "memory: use fewer workers"
        ) from None
    if error is not None:
        raise error
    return result


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """Answer every job with its result or its exception, until the other side closes."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        while True:
            job = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = (function(job), None)
            except Exception as error:  # it is raised again where the result is waited for
                error.add_note("".join(traceback.format_exc()))
                answer = (None, error)
            connection.send(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
