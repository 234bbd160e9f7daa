"""One run at a time in a folder, whoever holds it and however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankrl.errors import FolderInUseError, StorageError
from rankrl.runs.run_folder import LOCK_FILE, check_free, locked

HOLD = """
import sys, time
from pathlib import Path
from rankrl.runs.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a folder in another process."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_told_who_holds_the_folder_and_a_killed_one_holds_it_no_more(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        for refused in (lambda: check_free(tmp_path), lambda: locked(tmp_path).__enter__()):
            with pytest.raises(FolderInUseError) as error:
                refused()
            assert f"{tmp_path} is in use by process {process.pid} on {os.uname().nodename}, since 20" in str(
                error.value
            )
            assert str(tmp_path) in str(error.value).partition("(`")[2], "the command"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_FILE).exists(), "what a killed process leaves"
    check_free(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_of_many_threads_one_gets_the_folder_at_a_time(tmp_path: Path) -> None:
    inside, most, entered = [0], [0], [0]

    def run(_: int) -> None:
        try:
            with locked(tmp_path / "run"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                entered[0] += 1
                inside[0] -= 1
        except FolderInUseError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(400)))
    assert most[0] == 1
    assert entered[0] >= 1
    assert list((tmp_path / "run").iterdir()) == []


def test_a_thread_beside_is_refused_and_an_error_releases(tmp_path: Path) -> None:
    def fail() -> None:
        with locked(tmp_path), ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: locked(tmp_path).__enter__()).result()

    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        fail()
    with locked(tmp_path):
        pass


def _wait(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(30)


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun, end = context.Event(), context.Event()
    with locked(tmp_path):
        child = context.Process(target=_wait, args=(begun, end))
        child.start()
        begun.wait(30)
        with pytest.raises(FolderInUseError):
            check_free(tmp_path)
    with locked(tmp_path):  # while the child lives
        assert child.is_alive()
    end.set()
    child.join()


def test_a_file_system_without_locks_tells_processes_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path):
        assert "has no locks" in caplog.text
        with pytest.raises(FolderInUseError):
            check_free(tmp_path)
    words = {"process": 2**22 + 1, "host": os.uname().nodename, "since": "yesterday", "command": "rankrl"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(words))  # of a process that was killed
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"), locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("name", ["file", "file/run", "x" * 300])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"), locked(tmp_path / name):
        pass
