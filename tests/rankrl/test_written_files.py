"""A user's own files among those of a run: one that overwrites removes what runs wrote, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from decomposition.files import announce_write
from rankrl.errors import ConfigError, StorageError
from rankrl.files import FILE_LIST, PREVIOUS, recording, write_atomically, write_json, written_files
from rankrl.runs.run_folder import RunFolder
from rankrl.runs.tracking import start_tracking

OURS = ("plan.json", "plots/reward.png", ".hydra/config.yaml", "state/train.safetensors", "kit/kit.json")
THEIRS = (
    *("plots/fig.png", "plots/raw/x.csv", ".hydra/old.yaml", "state/mine.json", "kit/times.json"),
    *("searches/mine.txt", "tracking/mine.csv", "tensorboard/events.mine", "notes.md"),
)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


def ended(folder: Path, *names: str, seed: int = 0) -> RunFolder:
    """A run that wrote files and has ended."""
    run = RunFolder(folder)
    with run.held():
        run.prepare()
        run.claim({"seed": seed}, [])
        for name in names:
            write_atomically(folder / name, "ours")
        run.finish({"seed": seed})
    return run


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_what_a_user_put_into_our_folders_outlives_every_run(first: str, tmp_path: Path) -> None:
    if first == "theirs":
        put(tmp_path, *THEIRS)
    run = ended(tmp_path, *OURS)
    put(tmp_path, *THEIRS)
    assert run.holds_results
    run.begin_anew()
    assert {name for name in files(tmp_path) if not name.startswith(PREVIOUS)} == set(THEIRS)
    ended(tmp_path, "model.onnx", seed=1)
    assert files(tmp_path) == {*THEIRS, "model.onnx", "metrics.json", "state/configuration.json", FILE_LIST}
    run.remove_results()
    assert files(tmp_path) >= set(THEIRS)
    run.begin_anew()
    assert files(tmp_path) == set(THEIRS)
    assert {(tmp_path / name).read_text() for name in THEIRS} == {"mine"}


def test_a_folder_of_a_users_files_alone_holds_no_run(tmp_path: Path) -> None:
    put(tmp_path, *THEIRS, "state/mine.safetensors")
    run = RunFolder(tmp_path)
    assert not run.holds_results
    run.check({"seed": 0})
    run.replace({"seed": 0})
    run.discard()
    assert files(tmp_path) == {*THEIRS, "state/mine.safetensors"}


@pytest.mark.parametrize("name", ["model.onnx", "metrics.json", "plots/reward.png", "compare.csv"])
def test_a_file_that_a_run_would_replace_is_refused_before_it_begins(name: str, tmp_path: Path) -> None:
    put(tmp_path, name)
    for refuses in (RunFolder.check, RunFolder.replace):
        with pytest.raises(ConfigError, match=rf"holds {name}, which no run wrote .* move it to another"):
            refuses(RunFolder(tmp_path), {"seed": 0})
    (tmp_path / name).rename(tmp_path / "moved")
    ended(tmp_path, name)
    assert (tmp_path / "moved").read_text() == "mine"


def test_a_name_that_was_not_known_before_is_refused_when_it_is_written(tmp_path: Path) -> None:
    put(tmp_path, ".hydra/config.yaml")
    with recording(tmp_path), pytest.raises(StorageError, match="which no run wrote"):
        write_atomically(tmp_path / ".hydra" / "config.yaml", "ours")
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "mine"


KILLED = """
import os, sys
from pathlib import Path
from rankrl.files import atomic_path, write_atomically
from rankrl.runs.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
with run.held():
    run.claim({"seed": 0}, [])
    write_atomically(run.path / "episodes.csv", "ours")
    with atomic_path(run.path / "plots" / "reward.png") as path:
        path.write_text("ours")
        os.replace(path, run.path / "plots" / "reward.png")
        os._exit(9)
"""


def test_the_list_holds_after_a_run_was_killed(tmp_path: Path) -> None:
    put(tmp_path, "plots/mine.png")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == 9
    put(tmp_path, "plots/later.png")
    assert RunFolder(tmp_path).holds_results
    RunFolder(tmp_path).begin_anew()
    assert files(tmp_path) == {"plots/mine.png", "plots/later.png", "run.lock"}


@pytest.mark.parametrize("content", [None, "", '{"files": ["plan.js', "[]", '{"files": 3}'])
def test_a_run_without_a_list_goes_on_and_is_not_overwritten(content: str | None, tmp_path: Path) -> None:
    run = ended(tmp_path, *OURS)
    (tmp_path / FILE_LIST).unlink() if content is None else (tmp_path / FILE_LIST).write_text(content)
    before = files(tmp_path)
    assert run.holds_results
    with pytest.raises(ConfigError, match=r"files\.json, is missing or damaged.* choose another folder"):
        run.replace({"seed": 1})
    assert files(tmp_path) == before
    ended(tmp_path, "plan.json")
    assert files(tmp_path) == before


def test_a_list_leads_nowhere_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    put(tmp_path, "other", "run/notes.md")
    write_json(run / FILE_LIST, {"files": ["../other", "plots/../../other", "notes.md", "/etc/hosts", ""]})
    assert written_files(run) == set()
    RunFolder(run).begin_anew()
    assert files(tmp_path) == {"other", "run/notes.md"}


def test_files_of_trackers_are_listed(tmp_path: Path) -> None:
    put(tmp_path, "tensorboard/events.mine", "tracking/mine.csv")
    with recording(tmp_path), start_tracking("tensorboard", tmp_path, {"seed": 0}) as tracking:
        tracking.result({"onnx": {"accuracy": 0.5}})
    listed = written_files(tmp_path)
    assert listed is not None
    assert listed | {FILE_LIST} == files(tmp_path) - {"tensorboard/events.mine", "tracking/mine.csv"}
    assert {name.partition("/")[0] for name in listed} == {"tensorboard", "tracking"}


def test_writes_elsewhere_and_without_a_run_are_nobodys(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        announce_write(tmp_path / "plan.json")
        announce_write(tmp_path / "run" / "cache" / "fit.safetensors")
    announce_write(tmp_path / "run" / "plan.json")
    assert files(tmp_path) == set()
