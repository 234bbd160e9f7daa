"""The tasks of the command line, on digits with a small network."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime import InferenceSession

from decomposition import CompressionPlan, list_formats
from rankrl.tasks import list_tasks

_spec = importlib.util.spec_from_file_location("app_conftest", Path(__file__).with_name("conftest.py"))
assert _spec is not None
assert _spec.loader is not None
_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_conftest)
QUICK, read_json = _conftest.QUICK, _conftest.read_json

Command = Callable[..., None]


@pytest.fixture
def run(rankrl: Command, tmp_path: Path) -> Callable[..., Path]:
    """Run a quick task in its own folder and return the folder."""

    def task(name: str, *arguments: str) -> Path:
        folder = tmp_path / name
        rankrl(*QUICK, f"hydra.run.dir={folder}", *arguments)
        return folder

    return task


def test_pipeline_writes_the_run_folder(run: Callable[..., Path]) -> None:
    folder = run("run", "budget.params=0.5")
    for name in (
        "plan.json",
        "episodes.csv",
        "metrics.json",
        "model.safetensors",
        "model.onnx",
        "report.html",
    ):
        assert (folder / name).stat().st_size > 0, name
    assert {path.name for path in (folder / "plots").iterdir()} >= {
        "reward.png",
        "layers.png",
        "finetune.png",
    }
    assert (folder / ".hydra" / "config.yaml").exists()
    metrics = read_json(folder / "metrics.json")
    assert metrics["compressed"]["params"] <= 0.5 * metrics["baseline"]["params"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert metrics["onnx"]["accuracy"] == pytest.approx(metrics["finetuned"]["accuracy"], abs=0.01)
    assert metrics["search"]["episodes"] == 3
    assert set(metrics["ratios"]) == {"params", "macs", "latency"}
    with (folder / "episodes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert all(float(row["params_kept"]) <= 0.5 for row in rows)
    candidates = read_json(folder / "candidates.json")
    best = max(rows, key=lambda row: float(row["reward"]))
    chosen = dict(zip(candidates, json.loads(best["choices"]), strict=True))
    for layer in json.loads((folder / "plan.json").read_text())["layers"]:
        if layer["name"] in chosen:
            assert layer["operations"] == candidates[layer["name"]][chosen[layer["name"]]]["operations"]
    model = onnx.load(folder / "model.onnx")
    stored = {entry.key: entry.value for entry in model.metadata_props}
    plan = CompressionPlan.load(folder / "plan.json")
    assert CompressionPlan.from_json(stored["plan"]) == plan
    session = InferenceSession(folder / "model.onnx")
    assert not isinstance(session.get_inputs()[0].shape[0], int)


def test_same_seed_gives_the_same_plan_and_accuracies(run: Callable[..., Path]) -> None:
    first, second = run("first"), run("second")
    assert (first / "plan.json").read_bytes() == (second / "plan.json").read_bytes()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    for key in ("baseline", "compressed", "finetuned"):
        assert read_json(first / "metrics.json")[key] == read_json(second / "metrics.json")[key]


@pytest.mark.parametrize("name", list_formats())
def test_every_format_goes_through_search_and_apply(run: Callable[..., Path], name: str) -> None:
    searched = run("search", "task=search", f"decomposition={name}", "selector=greedy")
    assert "baseline" not in read_json(searched / "metrics.json")
    applied = run(
        "apply",
        "task=apply",
        f"decomposition={name}",
        f"plan={searched / 'plan.json'}",
        f"model.checkpoint={searched / 'dense.safetensors'}",
    )
    metrics = read_json(applied / "metrics.json")
    assert metrics["compressed"]["params"] <= 0.4 * metrics["baseline"]["params"]


def test_tasks_in_a_row_do_what_the_pipeline_does(run: Callable[..., Path]) -> None:
    whole = run("whole")
    checkpoint = f"model.checkpoint={whole / 'dense.safetensors'}"
    searched = run("search", "task=search", checkpoint)
    applied = run("apply", "task=apply", checkpoint, f"plan={searched / 'plan.json'}")
    weights = f"weights={applied / 'model.safetensors'}"
    tuned = run("finetune", "task=finetune", checkpoint, weights)
    exported = run("export", "task=export", checkpoint, f"weights={tuned / 'model.safetensors'}")
    evaluated = run("evaluate", "task=evaluate", checkpoint, f"weights={tuned / 'model.safetensors'}")
    expected = read_json(whole / "metrics.json")
    assert (searched / "plan.json").read_bytes() == (whole / "plan.json").read_bytes()
    assert read_json(applied / "metrics.json")["compressed"] == expected["compressed"]
    assert read_json(tuned / "metrics.json")["finetuned"] == expected["finetuned"]
    assert read_json(exported / "metrics.json")["onnx"]["accuracy"] == expected["onnx"]["accuracy"]
    assert (
        read_json(evaluated / "metrics.json")["compressed"]["accuracy"] == expected["finetuned"]["accuracy"]
    )


def test_train_and_inspect(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("train", "task=train", "model=resnet20", "train.epochs=5", "train.optim.lr=0.1")
    assert 0.5 < read_json(folder / "metrics.json")["baseline"]["accuracy"] <= 1
    run("inspect", "task=inspect", "model=resnet20", f"model.checkpoint={folder / 'dense.safetensors'}")
    assert "conv1" in capsys.readouterr().out


def test_interrupted_pipeline_goes_on_to_the_same_result(
    run: Callable[..., Path], rankrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole")

    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("rankrl.tasks.steps.apply_plan", kill)
        with pytest.raises(Killed):
            run("broken")
    broken = whole.parent / "broken"
    assert not (broken / "metrics.json").exists()
    rankrl(f"resume={broken}")
    for name in ("plan.json", "model.safetensors", "dense.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name


def test_run_that_dies_while_reporting_does_not_look_finished(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr("rankrl.tasks.steps.write_report", kill)
    with pytest.raises(Killed):
        run("broken", "task=train")
    assert not (tmp_path / "broken" / "metrics.json").exists()


def test_ctrl_c_says_how_to_go_on(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankrl.tasks.steps.apply_plan", interrupt)
    with pytest.raises(SystemExit) as stopped:
        run("stopped")
    assert stopped.value.code == 130
    message = capfd.readouterr().err
    assert "`rankrl resume=" in message
    assert "Traceback" not in message


def test_a_new_run_refuses_the_folder_of_an_earlier_one(
    run: Callable[..., Path], rankrl: Command, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = run("train", "task=train")
    before = (folder / ".hydra" / "overrides.yaml").read_text()
    for arguments in (("task=train",), ("task=search",)):
        with pytest.raises(SystemExit) as refused:
            run("train", *arguments)
        assert refused.value.code == 2
        message = capfd.readouterr().err
        assert "holds a run already; `rankrl resume=" in message
        assert "Traceback" not in message
    assert (folder / ".hydra" / "overrides.yaml").read_text() == before
    rankrl(f"resume={folder}", "export.runs=4")
    assert not (tmp_path / "runs").exists()


def test_a_run_in_a_folder_with_unusual_characters_can_be_resumed(
    run: Callable[..., Path], rankrl: Command, tmp_path: Path
) -> None:
    folder = run("first", "task=train").rename(tmp_path / "a=1,b='x y'")
    (folder / "metrics.json").unlink()
    rankrl(f"resume={folder}")
    assert (folder / "metrics.json").exists()


def test_overrides_may_stand_around_flags(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("seed=1", "--cfg", "job", "task=train")
    shown = capfd.readouterr().out
    assert "task: train" in shown
    assert "seed: 1" in shown


def test_help_names_the_tasks_and_the_groups(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        rankrl("--help")
    assert not left.value.code
    shown = capfd.readouterr().out
    for expected in ("task=inspect", "decomposition: auto, cp, tensor_ring", "tracking: csv, ", "search:"):
        assert expected in shown


def test_shell_completion_can_be_installed(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("-sc", "install=bash")
    assert "hydra_bash_completion" in capfd.readouterr().out


def test_every_task_is_named_in_the_configuration() -> None:
    text = (Path(__file__).parents[3] / "configs" / "config.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("# What to do:"))
    assert set(list_tasks()) == set(
        line.removeprefix("# What to do:").replace("(all of it)", "").strip(" .").replace(" ", "").split(",")
    )
