"""When a folder counts as that of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankrl.errors import ConfigError
from rankrl.files import write_atomically
from rankrl.runs import run_folder
from rankrl.runs.run_folder import RunFolder

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
    folder.claim({"seed": 0}, [])
    folder.claim({"seed": 1}, [], resume=True)
    with pytest.raises(ConfigError, match="seed"):
        folder.claim({"seed": 2}, [])


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
        written(tmp_path, "state/search.safetensors")
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
