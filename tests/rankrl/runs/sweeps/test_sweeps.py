"""Sweeps: named folders, finished jobs skipped, failed ones listed and never the end of the others."""

import importlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import Killed, kill
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file

from rankrl.cli.app import main
from rankrl.models import save_checkpoint
from rankrl.runs.run_folder import locked
from rankrl.runs.sweeps.jobs import take_one_gpu

Sweep = Callable[..., int]
FOLDER = Path("sweep")
GOOD_AND_BAD = "model.checkpoint=w.safetensors,missing.th"
GOOD, BAD = "model.checkpoint-w.safetensors", "model.checkpoint-missing.th"


def finished() -> list[str]:
    return sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("metrics.json"))


def written() -> dict[str, int]:
    return {name: (FOLDER / name / "metrics.json").stat().st_mtime_ns for name in finished()}


def test_jobs_are_named_after_what_varies_and_finished_ones_are_skipped(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=0,1", "dataset.heldout=10") == 0
    assert finished() == ["seed-0", "seed-1"]
    told = capfd.readouterr()
    assert re.search(r"#1 : .*seed=1", told.out)
    before = written()
    assert sweep("seed=0,1,2", "dataset.heldout=10") == 0
    assert finished() == ["seed-0", "seed-1", "seed-2"]
    assert {name: time for name, time in written().items() if name in before} == before

    before = written()
    assert sweep("seed=0,1", "dataset.heldout=20") == 1, "another configuration is not matched"
    assert written() == before
    message = capfd.readouterr().err
    assert "2 jobs of the sweep failed" in message
    assert "dataset.heldout was 10, is now 20" in message
    assert sweep("seed=0,1", "dataset.heldout=20", "overwrite=true") == 0
    again = written()
    assert all(again[name] != before[name] for name in ("seed-0", "seed-1"))
    assert again["seed-2"] == before["seed-2"]
    assert sweep("seed=0,1", "dataset.heldout=20", "overwrite=true") == 0
    assert written() == again, "the same jobs are skipped"


def test_a_job_whose_folder_is_in_use_is_listed_and_leaves_that_run_alone(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked(FOLDER / "seed-0"):
        (FOLDER / "seed-0" / ".hydra").mkdir()
        (FOLDER / "seed-0" / ".hydra" / "overrides.yaml").write_text("- seed=7\n")
        assert sweep("seed=0,1") == 1
        assert (FOLDER / "seed-0" / ".hydra" / "overrides.yaml").read_text() == "- seed=7\n"
        assert not (FOLDER / "seed-0" / "state").exists()
    assert finished() == ["seed-1"]
    shutil.rmtree(FOLDER / "seed-0" / ".hydra")
    assert "seed-0 is in use by process" in capfd.readouterr().err.partition("1 job of the sweep failed:")[2]
    assert sweep("seed=0,1") == 0
    assert finished() == ["seed-0", "seed-1"]
    assert not list(FOLDER.rglob("run.lock"))


def test_a_job_that_fails_leaves_the_others_alone_and_is_listed(
    sweep: Sweep, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("a defect of ours")

    with monkeypatch.context() as patch:
        patch.setattr("rankrl.cli.tasks.compression.network_numbers", crash)
        assert sweep(GOOD_AND_BAD) == 1
    assert finished() == []
    message = capfd.readouterr().err
    listed = message.partition("2 jobs of the sweep failed:")[2]
    assert f"{GOOD}: RuntimeError: a defect of ours" in listed
    assert f"{BAD}: model.checkpoint cannot be read: there is no file missing.th" in listed
    content = json.loads((FOLDER / GOOD / "error.json").read_text())
    assert content["type"] == "RuntimeError"
    assert "Traceback" in content["traceback"]

    assert sweep(GOOD_AND_BAD) == 1  # the defect is mended, the file is still missing
    assert finished() == [GOOD]
    assert not (FOLDER / GOOD / "error.json").exists()
    assert "1 job of the sweep failed" in capfd.readouterr().err

    assert sweep("model.checkpoint=w.safetensors,w2.safetensors") == 1
    listed = capfd.readouterr().err.rpartition("1 job of the sweep failed:")[2]
    assert "w2.safetensors" in listed
    assert "missing.th" not in listed, "a failure of an earlier sweep"


def test_an_interrupted_job_goes_on_from_its_state(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    training = (
        "task=train",
        "model.checkpoint=null",
        "train.epochs=1",
        "seed=0,1",
        "dataset.train_images=64",
    )
    with monkeypatch.context() as patch:
        patch.setattr("rankrl.cli.tasks.compression.network_numbers", kill)
        with pytest.raises(Killed):
            sweep(*training)
    state = FOLDER / "seed-0" / "state" / "train.safetensors"
    trained = state.stat().st_mtime_ns
    assert sweep(*training) == 0
    assert state.stat().st_mtime_ns == trained
    assert finished() == ["seed-0", "seed-1"]


def test_a_bad_value_anywhere_in_a_sweep_stops_it_before_it_starts(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("task=search", "search.episodes=1,many") == 2
    assert sweep("task=finetune", "optim=sgd,onnx_adm") == 2
    message = capfd.readouterr().err
    assert "Did you mean 'onnx_adam'" in message
    assert "Traceback" not in message
    assert not FOLDER.exists()


def test_a_misspelt_launcher_is_told_with_those_of_plugins(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=0,1", "hydra/launcher=joblb") == 2
    message = capfd.readouterr().err
    assert "hydra/launcher=joblb is unknown; choose from basic, joblib, local, ray" in message
    assert "Did you mean 'joblib'?" in message


def test_a_job_can_be_resumed_alone_and_a_sweep_by_its_command(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=0,1") == 0
    assert sweep("resume=sweep") == 2
    assert "finished jobs are skipped" in capfd.readouterr().err
    metrics = FOLDER / "seed-1" / "metrics.json"
    before = json.loads(metrics.read_text())
    metrics.unlink()
    monkeypatch.setattr(sys, "argv", ["rankrl", "resume=sweep/seed-1"])
    GlobalHydra.instance().clear()
    main()
    assert json.loads(metrics.read_text())["baseline"] == before["baseline"]


def test_ready_sweeps_name_their_jobs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKRL_DATA", "nowhere")
    monkeypatch.setattr("torchvision.datasets.utils.download_url", _no_network)
    words = ["rankrl", "experiment=cifar10_sweep", "hydra.sweep.dir=sweep", "tracking=none"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "9 jobs of the sweep failed" in capfd.readouterr().err
    names = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert len(names) == 9
    assert names[0] == "budget.params-0.25+decomposition-cp"


def _no_network(*_: object, **__: object) -> None:
    raise OSError("no network in tests")


LAUNCHERS = {
    "joblib": ("joblib", ("hydra.launcher.n_jobs=2",)),
    "submitit_local": ("submitit", ("hydra.launcher.timeout_min=5",)),
    "local": ("joblib", ("hydra.launcher.n_jobs=2", "hydra.launcher.retries=1")),
    "ray": ("ray", ("+hydra.launcher.init.num_cpus=2", "hydra.launcher.retries=1")),
}


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """The options of a launcher, which ends with the test."""
    package, options = LAUNCHERS[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    yield (f"hydra/launcher={request.param}", *options)
    if package == "ray":
        importlib.import_module("ray").shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("launched", LAUNCHERS, indirect=True)
def test_jobs_run_beside_each_other_and_the_failed_ones_again(
    launched: tuple[str, ...], sweep: Sweep
) -> None:
    assert sweep(GOOD_AND_BAD, *launched) == 1
    assert finished() == [GOOD]
    assert (FOLDER / BAD / "error.json").exists()

    before = written()[GOOD]
    torch.save(load_file("w.safetensors"), "missing.th")
    assert sweep(GOOD_AND_BAD, *launched) == 0
    assert finished() == sorted([GOOD, BAD])
    assert written()[GOOD] == before
    assert not (FOLDER / BAD / "error.json").exists()


DEADLY = """
import os, signal
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, deaths=0):
        super().__init__()
        for number in range(deaths):
            flag = Path(f"died-{deaths}-{number}")
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.net(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["local", "ray"], indirect=True)
def test_a_killed_job_is_started_again_and_the_others_run_on(
    launched: tuple[str, ...],
    sweep: Sweep,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("deadly_network.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    save_checkpoint(importlib.import_module("deadly_network").Net(10), Path("deadly.safetensors"))
    sys.modules.pop("deadly_network")
    network = ("model=custom", "model._target_=deadly_network.Net", "model.checkpoint=deadly.safetensors")
    assert sweep(*network, "+model.deaths=0,1,2,3", *launched) == 1
    assert finished() == ["+model.deaths-0", "+model.deaths-1"]  # one start again is allowed
    told = capfd.readouterr()
    listed = told.err.partition("2 jobs of the sweep failed:")[2]
    assert "+model.deaths-2: its process ended without a result each time that it was started" in listed
    assert "+model.deaths-3: " in listed
    assert "sweep: 2 of 4 jobs finished; 2 failed" in told.out

    assert sweep(*network, "+model.deaths=0,1,2,3", *launched) == 0  # each flag is set by now
    assert len(finished()) == 4


@pytest.mark.parametrize(
    ("given", "present", "job", "expected"),
    [
        (None, 4, 6, "2"),
        (None, 1, 3, None),
        (None, 0, 3, None),
        ("5,7", 2, 1, "7"),
        ("3", 1, 8, "3"),
        ("", 0, 8, ""),
    ],
)
def test_each_job_sees_one_gpu(
    given: str | None, present: int, job: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: present)
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    take_one_gpu(job, environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == expected
