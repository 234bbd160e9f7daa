"""Jobs in processes of their own: all results, errors as they were, and no process left behind."""

import multiprocessing
import os
import signal
import sys

import pytest

from decomposition.choose import processes
from decomposition.choose.processes import in_processes
from decomposition.errors import DecompositionError


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param("fork", marks=pytest.mark.skipif(sys.platform == "win32", reason="has no fork")),
        pytest.param("spawn", marks=pytest.mark.slow),  # every process imports torch
    ],
)
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How processes start; those that are forked have torch, and may not compute gradients with it."""
    own = multiprocessing.get_context(request.param)
    monkeypatch.setattr(processes, "get_context", lambda _: own)


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


def test_all_jobs_are_answered_by_no_more_than_the_workers(others) -> None:
    made: list[int] = []

    def jobs() -> object:
        for number in range(6):
            made.append(number)
            yield number

    found = []
    for result in in_processes(square, jobs(), 2, "squares"):  # type: ignore[arg-type]
        found.append(result)
        assert len(made) <= len(found) + 2
    assert sorted(found) == [0, 1, 4, 9, 16, 25]
    assert set(multiprocessing.active_children()) <= others


def test_more_workers_than_jobs_and_none_at_all() -> None:
    assert list(in_processes(square, [3], 4, "squares")) == [9]
    assert list(in_processes(square, [], 2, "squares")) == []
    with pytest.raises(DecompositionError, match="squares take 1 worker or more, got workers=0"):
        list(in_processes(square, [1], 0, "squares"))


def test_an_error_is_raised_where_the_results_are_taken_and_ends_all(others) -> None:
    with pytest.raises(ValueError, match="no root is -1"):
        list(in_processes(square, [1, -1, 2, 3], 2, "squares"))
    assert set(multiprocessing.active_children()) <= others


def dying_once(job: tuple[int, str]) -> int:
    number, path = job
    if path and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_the_job_of_a_killed_worker_is_done_by_another(tmp_path, others) -> None:
    jobs = [(0, ""), (1, str(tmp_path / "died")), (2, ""), (3, "")]
    assert sorted(in_processes(dying_once, jobs, 2, "jobs")) == [0, 1, 2, 3]
    assert set(multiprocessing.active_children()) <= others


def test_a_job_that_kills_every_worker_is_told_of() -> None:
    with pytest.raises(DecompositionError, match=r"ended with code -9 and no result; .*fewer workers"):
        list(in_processes(square, [99], 1, "squares"))


def test_taking_no_more_results_ends_the_workers(others) -> None:
    results = in_processes(square, range(100), 2, "squares")
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= others
