"""A sweep that grows takes up the jobs that are there, whatever varied when they ran."""

import csv
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rankrl.errors import ConfigError, FolderInUseError
from rankrl.files import write_json
from rankrl.report import write_sweep_report
from rankrl.runs.run_folder import RunFolder, locked
from rankrl.runs.sweeps.jobs import job_folder, run_sweep_job

Sweep = Callable[..., int]
Command = Callable[[Sequence[str]], int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "sweep"
    write_json(path / "sweep.json", {"id": str(tmp_path)})
    return path


def job(path: Path, *, ended: bool = True, **options: Any) -> RunFolder:
    run = RunFolder(path)
    run.prepare()
    run.claim(options, [])
    (run.state / "train.safetensors").touch()
    if ended:
        run.metrics.write_text("{}")
    return run


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_gets_the_name_that_says_more(folder: Path, ended: bool) -> None:
    job(folder / "params-0.5", ended=ended, params=0.5, seed=0)
    new = RunFolder(folder / "params-0.5+seed-0")
    new.path.mkdir()
    (new.path / "rankrl.log").touch()  # of Hydra's
    assert job_folder(new, {"params": 0.5, "seed": 0}, folder) == new
    assert new.finished is ended
    assert new.recorded() == {"params": 0.5, "seed": 0}
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["params-0.5+seed-0"]
    assert not list(folder.rglob("run.lock"))


def test_a_job_keeps_its_folder_where_the_new_name_says_less_or_is_taken(folder: Path) -> None:
    known = job(folder / "params-0.5+seed-1", params=0.5, seed=1)
    for taken in (False, True):
        new = RunFolder(folder / "params-0.5")
        if taken:
            job(new.path, params=0.5, seed=0)
        assert job_folder(new, {"params": 0.5, "seed": 1}, folder) == known
        assert new.path.exists() is taken
    unknown = {"params": 0.5, "seed": 2}
    assert job_folder(new, unknown, folder) == new
    with pytest.raises(ConfigError, match="seed was 0, is now 2"):
        new.check(unknown)


def test_finished_jobs_of_another_sweep_are_copied(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    job(old / "seed-0", seed=0)
    job(old / "seed-1", seed=1, ended=False)
    config = {"reuse": str(old), "overwrite": False}
    for seed, copied in enumerate((True, False, False)):
        new = RunFolder(folder / f"seed-{seed}")
        assert job_folder(new, {"seed": seed, **config}, folder) == new
        assert new.finished is copied
    assert RunFolder(old / "seed-0").finished
    assert RunFolder(folder / "seed-0").recorded() == {"seed": 0}


def test_a_job_that_runs_is_left_alone(folder: Path) -> None:
    known = job(folder / "seed-0", seed=0, ended=False)
    with locked(known.path), pytest.raises(FolderInUseError):
        job_folder(RunFolder(folder / "longer+seed-0"), {"seed": 0}, folder)
    assert known.holds_results


def test_a_job_that_failed_runs_again_under_its_new_name(folder: Path) -> None:
    failed = job(folder / "seed-0", seed=0, ended=False)
    failed.error.write_text("{}")
    done = []
    run_sweep_job(
        done.append,
        RunFolder(folder / "lr-1+seed-0"),
        number=0,
        config={"seed": 0},
        overrides=[],
        choices=[],
        record=done.append,
        sweep_folder=folder,
        explain=str,
    )
    assert [run.path.name for run in done] == ["lr-1+seed-0"] * 2
    assert not list(folder.rglob("error.json"))


@pytest.mark.slow
def test_a_grown_sweep_counts_each_job_once(sweep: Sweep, capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep("dataset.heldout=10,20") == 0
    assert sweep("dataset.heldout=10,20", "seed=0,1") == 0
    assert "4 finished runs" in capfd.readouterr().out
    before = {path.stat().st_mtime_ns for path in Path("sweep").glob("*/metrics.json")}
    assert sweep("dataset.heldout=10,20", "seed=0,1", "dataset.train_images=null,64") == 0
    shown = capfd.readouterr()
    assert "8 finished runs" in shown.out
    assert (shown.out + shown.err).count("finished already") == 4
    assert before < {path.stat().st_mtime_ns for path in Path("sweep").glob("*/metrics.json")}
    write_sweep_report("sweep")
    with Path("sweep/runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    options = ("dataset.heldout", "dataset.train_images", "seed")
    assert len({tuple(row[option] for option in options) for row in rows}) == len(rows) == 8
    assert all(row["folder"].count("+") == 2 for row in rows)


def test_ctrl_c_names_the_command_that_goes_on(
    sweep: Sweep, command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = "rankrl -m task=evaluate model=conv4 tracking=none model.checkpoint=w.safetensors seed=0,1"
    with monkeypatch.context() as patch:
        patch.setattr("rankrl.cli.tasks.compression.network_numbers", stop)
        assert command(words.split()) == 130
    told = capfd.readouterr().err.rpartition("rankrl: stopped; `")[2]
    named = told.partition("` goes on")[0]
    (folder,) = Path("multirun").iterdir()
    assert named == f"{words} hydra.sweep.dir={folder}"
    assert command(shlex.split(named)) == 0
    assert sorted(path.parent.name for path in folder.glob("*/metrics.json")) == ["seed-0", "seed-1"]
