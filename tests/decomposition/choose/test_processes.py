"""Jobs in processes of their own: all results, errors as they were, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest

from decomposition.choose.processes import WorkerPool, in_processes
from decomposition.errors import DecompositionError


class SameProcess:
    """Does jobs in the thread that waits for it."""

    def __init__(self, start_error: Exception | None = None) -> None:
        self._start_error, self.ended = start_error, False

    def start(self) -> None:
        if self._start_error is not None:
            raise self._start_error

    def apply(self, job: int) -> int:
        return square(job)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def others() -> set[multiprocessing.process.BaseProcess]:
    """Processes that are there before a test: joblib keeps those of an earlier sweep."""
    return set(multiprocessing.active_children())


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"no root is {number}")
    if number == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def test_all_jobs_are_answered_by_no_more_than_the_workers() -> None:
    made: list[int] = []

    def jobs() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    workers = [SameProcess(), SameProcess()]
    found = []
    for result in WorkerPool(workers).results(jobs()):
        found.append(result)
        assert len(made) <= len(found) + 2
    assert sorted(found) == [0, 1, 4, 9, 16, 25]
    assert all(worker.ended for worker in workers)


def test_results_come_in_the_order_of_the_jobs_and_errors_where_they_are_taken() -> None:
    pool = WorkerPool([SameProcess(), SameProcess()])
    assert pool.map(range(5)) == [0, 1, 4, 9, 16]
    assert pool.map([]) == []
    with pytest.raises(ValueError, match="no root is -1"):
        pool.map([1, -1, 2])
    assert pool.map([3]) == [9], "the workers go on"
    pool.close()


def test_a_worker_that_does_not_start_is_told_of() -> None:
    with pytest.raises(OSError, match="no room"):
        list(WorkerPool([SameProcess(OSError("no room"))]).results([1]))


def test_no_workers_are_refused() -> None:
    with pytest.raises(DecompositionError, match="squares take 1 worker or more, got workers=0"):
        list(in_processes(square, [1], 0, "squares"))


@pytest.mark.slow
def test_an_error_in_a_process_is_raised_and_ends_all(others) -> None:
    found = in_processes(square, [1, -1, 2, 3], 2, "squares")
    with pytest.raises(ValueError, match="no root is -1"):
        list(found)
    assert set(multiprocessing.active_children()) <= others


def dying_once(job: tuple[int, str]) -> int:
    number, path = job
    if path and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_the_job_of_a_killed_worker_is_done_by_another(tmp_path, others) -> None:
    jobs = [(0, ""), (1, str(tmp_path / "died")), (2, ""), (3, "")]
    assert sorted(in_processes(dying_once, jobs, 2, "jobs")) == [0, 1, 2, 3]
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.slow
def test_a_job_that_kills_every_worker_is_told_of() -> None:
    with pytest.raises(DecompositionError, match=r"squares died \(SIGKILL\(-9\)\); .*fewer workers"):
        list(in_processes(square, [99], 1, "squares"))


@pytest.mark.slow
def test_taking_no_more_results_ends_the_workers(others) -> None:
    results = in_processes(square, range(100), 2, "squares")
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= others
