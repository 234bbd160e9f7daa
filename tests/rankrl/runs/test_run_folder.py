"""When a folder counts as that of a run."""

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

from rankrl.errors import ConfigError, FolderInUseError, StorageError
from rankrl.files import write_atomically
from rankrl.runs import run_folder
from rankrl.runs.run_folder import LOCK_FILE, RunFolder, check_free, locked

RESULTS = (
    "metrics.json",
    "plan.json",
    "episodes.csv",
    "state/masks.safetensors",
    "searches/tpe-0/episodes.csv",
)


def written(folder: Path, name: str) -> RunFolder:
    run = RunFolder(folder)
    with run.held():
        write_atomically(folder / name, "")
    return run


def claimed(folder: Path, seed: int) -> RunFolder:
    run = RunFolder(folder)
    with run.held():
        run.prepare()
        run.claim({"seed": seed}, [])
    return run


@pytest.mark.parametrize("name", RESULTS)
def test_a_folder_with_results_belongs_to_its_configuration(name: str, tmp_path: Path) -> None:
    folder = claimed(tmp_path, 0)
    assert written(tmp_path, name).holds_results
    folder.check({"seed": 0})
    folder.claim({"seed": 1})
    with pytest.raises(ConfigError, match="seed was 1, is now 2"):
        folder.check({"seed": 2})


@pytest.mark.parametrize("name", RESULTS)
def test_beginning_anew_leaves_what_is_no_runs(name: str, tmp_path: Path) -> None:
    folder = claimed(tmp_path, 0)
    written(tmp_path, name)
    (tmp_path / "notes.txt").touch()
    folder.replace({"seed": 0})
    assert folder.holds_results, "the same configuration goes on"
    folder.replace({"seed": 1})
    assert not folder.holds_results
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]
    claimed(tmp_path, 1)


def ended(folder: Path, seed: int) -> RunFolder:
    run = claimed(folder, seed)
    with run.held():
        run.finish({"seed": seed})
    return run


def test_results_stay_until_those_that_replace_them_are_there(tmp_path: Path) -> None:
    run = ended(tmp_path, 0)
    for new in (1, 2):  # the first one is killed, and replaced by the second
        run.begin_anew()
        claimed(tmp_path, new)
        written(tmp_path, "state/train.safetensors")
        assert not run.finished
        assert not run.bring_back(), "there are new results"
        assert json.loads((tmp_path / ".previous" / "metrics.json").read_text()) == {"seed": 0}
        assert list(RunFolder.below(tmp_path)) == [run]
    with run.held():
        run.finish({"seed": 2})
    assert not (tmp_path / ".previous").exists()


def test_a_run_that_gets_nowhere_replaces_nothing(tmp_path: Path) -> None:
    run = ended(tmp_path, 0)
    written(tmp_path, "plots/front.png")
    run.begin_anew()
    claimed(tmp_path, 1).discard()
    assert json.loads(run.metrics.read_text()) == run.recorded() == {"seed": 0}
    assert (tmp_path / "plots" / "front.png").exists()
    assert not (tmp_path / ".previous").exists()


@pytest.mark.parametrize("name", [".hydra/config.yaml", "state/configuration.json", "rankrl.log"])
def test_a_folder_that_has_got_nowhere_is_free(name: str, tmp_path: Path) -> None:
    assert not written(tmp_path, name).holds_results


def test_a_refused_run_takes_its_folder_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "first"
    for name in (".hydra/config.yaml", "state/configuration.json"):
        written(path, name)
    (path / "rankrl.log").touch()
    RunFolder(path).discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "age"),
    [
        ("notes.txt", 0),
        ("state/dense.safetensors", 0),
        ("plan.json", 0),
        ("earlier.log", 9),
        ("state/own", 9),
    ],
)
def test_what_someone_may_want_is_kept_when_a_run_is_refused(name: str, age: float, tmp_path: Path) -> None:
    kept = tmp_path / name
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("")
    written = run_folder._BEGAN - age
    if age:
        os.utime(kept, (written, written))
    (tmp_path / "rankrl.log").write_text("")
    RunFolder(tmp_path).discard()
    assert kept.exists()


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
    assert not (tmp_path / "run" / LOCK_FILE).exists()


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


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_has_the_file_as_lock(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    for _ in range(2):
        with locked(tmp_path), pytest.raises(FolderInUseError, match="another run, which wrote"):
            check_free(tmp_path)
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
