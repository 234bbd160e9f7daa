"""How far a sweep is: told by its jobs in their folders, shown as one line."""

import io
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import open_dict
from rich.console import Console

from decomposition.progress import listening, progress_bar
from rankrl.cli.app import SweepCallback, number_of_jobs
from rankrl.cli.config.schema import config_folder
from rankrl.runs.run_folder import RunFolder
from rankrl.runs.sweeps import jobs
from rankrl.runs.sweeps.jobs import JobProgress, SweepState, SweepWatch


def job(sweep: Path, name: str, *, metrics: bool = False, error: bool = False) -> RunFolder:
    folder = RunFolder(sweep / name)
    folder.prepare()
    folder.claim({}, [])
    if metrics:
        folder.metrics.write_text("{}")
    if error:
        folder.error.write_text(json.dumps({"error": "broken"}))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    job(tmp_path, "seed-0", metrics=True)
    job(tmp_path, "seed-1", error=True)
    running = job(tmp_path, "deep/seed-2")
    with listening(JobProgress(running)), progress_bar("search", total=100, progress=False) as bar:
        bar.update(41)
    job(tmp_path, "seed-3")
    return tmp_path


def test_jobs_are_counted_and_say_what_they_are_at(sweep: Path) -> None:
    state = SweepState.of(sweep)
    assert (state.finished, state.failed) == (1, 1)
    assert sorted(state.running) == ["deep/seed-2: search 41 of 100", "seed-3"]
    line = state.line(9, 300.0)
    assert line.startswith("1 of 9 jobs finished; 1 failed; 2 running (")
    assert line.endswith("); about 5 min left")


def test_jobs_of_an_earlier_command_count_too() -> None:
    state = SweepState(finished=100, failed=0, running=["seed-3: search 1 of 5"])
    assert state.line(3, None).startswith("100 of 101 jobs finished; 1 running")
    assert state.line(200, None).startswith("100 of 200 jobs finished")


def test_a_job_that_has_been_silent_for_long_is_not_said_to_run(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 3600
    monkeypatch.setattr(jobs.time, "time", lambda: later)
    assert SweepState.of(sweep).running == []


def test_steps_in_quick_succession_are_written_once(tmp_path: Path) -> None:
    folder = job(tmp_path, "seed-0")
    tell = JobProgress(folder)
    tell("search", 1, 100)
    tell("search", 2, 100)
    assert json.loads(folder.progress.read_text()) == {"stage": "search", "completed": 1, "total": 100}
    folder.progress.unlink()
    (tmp_path / "gone").write_text("")
    JobProgress(RunFolder(tmp_path / "gone"))("search", 1, 100)  # the job itself will say what is wrong


def test_the_watch_estimates_and_draws_on_a_terminal(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SHOWN_EVERY", 0.01)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    watch = SweepWatch(sweep, 4, live=True, console=console)
    assert "left" not in watch.line()  # of this start, one job has failed and none is finished
    job(sweep, "seed-3", metrics=True)
    assert "2 of 4 jobs finished; 1 failed; 1 running (deep/seed-2: search 41 of 100); about" in watch.line()
    while "2 of 4" not in screen.getvalue():
        time.sleep(0.01)
    watch.stop()


def test_without_a_terminal_the_log_is_told(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "_LOGGED_EVERY", 0.01)
    caplog.set_level("INFO")
    watch = SweepWatch(sweep, None, live=False)
    while "1 job finished" not in caplog.text:
        time.sleep(0.01)
    watch.stop()
    assert len([each for each in caplog.records if "job finished" in each.message]) == 1


@pytest.mark.parametrize(
    ("overrides", "params", "jobs"),
    [
        (["seed=0,1,2", "decomposition=tucker,cp"], {}, 6),
        (["seed=range(5)", "task=train"], {}, 5),
        (["decomposition=cp"], {"seed": "0,1", "budget.params": "0.5,0.4,0.3"}, 6),
        ([], {}, 1),
    ],
)
def test_jobs_of_a_sweep_are_known_beforehand(
    overrides: list[str], params: dict[str, str], jobs: int
) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        config: Any = compose("config", return_hydra_config=True)
    GlobalHydra.instance().clear()
    with open_dict(config.hydra):
        config.hydra.overrides.task = overrides
        config.hydra.sweeper.params = params
    assert number_of_jobs(config) == jobs
    with open_dict(config.hydra):
        config.hydra.sweeper._target_ = "hydra_plugins.optuna.Sweeper"
    assert number_of_jobs(config) is None


def test_a_callback_takes_no_thread_to_other_processes(sweep: Path) -> None:
    callback = SweepCallback()
    callback._watch = SweepWatch(sweep, None, live=False)
    assert pickle.loads(pickle.dumps(callback))._watch is None
    callback._watch.stop()
