"""Paths that a run was given lead to the same files from any folder, and after both were moved."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import read_json, small_network, values

from rankrl.cli.app import checked_arguments
from rankrl.cli.config.choices import store_groups
from rankrl.cli.config.composition import parsed_overrides
from rankrl.cli.config.overrides import typed_options
from rankrl.cli.config.run_files import _is_path, named_paths, options_of_run, resumed_arguments
from rankrl.errors import ConfigError
from rankrl.runs.run_folder import RunFolder

Command = Callable[..., None]
Refused = Callable[..., str]


def a_run(*overrides: str, folder: str = "runs/a") -> Path:
    """The folder of a run that was begun from the current folder."""
    run = RunFolder(Path(folder))
    with run.held():
        config = values(*overrides)
        run.claim(config, overrides, paths=named_paths(config))
    return run.path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, the current one; another lies beside it."""
    (tmp_path / "other").mkdir()
    project = tmp_path / "proj"
    (project / "files").mkdir(parents=True)
    for name in ("net.th", "wide.th", "times.json", "more.json", "images.npz", "plan.json", "net.onnx"):
        (project / "files" / name).touch()
    monkeypatch.chdir(project)
    return project


def test_options_are_paths_by_their_types() -> None:
    choices = (
        ("model=onnx", "model.path=a.onnx", "dataset=inputs", "dataset.path=a.npz", "selector=bayes"),
        ("selector=ddpg", "pretrain.networks=[{architecture: conv4, checkpoint: a.th}]"),
    )
    typed = {
        option: hint for each in choices for option, _, hint in typed_options(values(*each)) if _is_path(hint)
    }
    assert set(typed) == {
        *("run", "runs", "resume", "reuse", "plan", "weights", "model.checkpoint", "model.path"),
        *("dataset.path", "finetune.teacher", "timing.table", "selector.policy"),
        *("pretrain.add", "pretrain.networks"),
    }


GIVEN: dict[str, tuple[tuple[str, ...], Any]] = {
    "model.checkpoint": (("model.checkpoint=files/net.th",), "net.th"),
    "finetune.teacher": (("finetune.teacher=[files/net.th,files/wide.th]",), ["net.th", "wide.th"]),
    "timing.table": (("budget.latency=0.5", "timing.table=files/times.json"), "times.json"),
    "dataset.path": (("dataset=npz", "dataset.path=files/images.npz"), "images.npz"),
    "model.path": (("model=onnx", "model.path=files/net.onnx"), "net.onnx"),
    "selector.policy": (("selector=ddpg", "selector.policy=files/net.th"), "net.th"),
    "pretrain.networks": (
        ("task=pretrain", "pretrain.networks=[{architecture:conv4,checkpoint:files/net.th}]"),
        [{"architecture": "conv4", "checkpoint": "net.th"}],
    ),
}


def below(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [below(folder, each) for each in value]
    if isinstance(value, dict):
        return {**value, "checkpoint": below(folder, value["checkpoint"])}
    return str(folder / "files" / value)


@pytest.mark.parametrize("option", GIVEN)
def test_a_resumed_run_finds_its_files(option: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, wanted = GIVEN[option]
    a_run(*overrides)

    def taken(folder: str) -> Any:
        arguments = resumed_arguments([f"resume={folder}"])
        return {each.key_or_group: each.value() for each in parsed_overrides(arguments)}[option]

    assert set(overrides) <= set(resumed_arguments(["resume=runs/a"])), (
        "as it was written, from the same folder"
    )
    monkeypatch.chdir(project.parent / "other")
    assert taken("../proj/runs/a") == below(project, wanted)
    moved = project.rename(project.parent / "moved")
    assert taken("../moved/runs/a") == below(moved, wanted)
    shutil.rmtree(moved / "files")
    with pytest.raises(ConfigError) as refused:
        taken("../moved/runs/a")
    for part in (f"{option}=files/", f"no {project}/files/", f"no {moved}/files/", f"{option}=PATH"):
        assert part in str(refused.value)


def test_a_network_that_is_gone_is_not_replaced_by_another(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run("model=conv4", "model.checkpoint=files/net.th", "finetune.teacher=files/wide.th")
    for name in ("plan.json", "model.safetensors"):
        (run / name).touch()
    monkeypatch.chdir(project.parent / "other")
    (project / "files" / "net.th").unlink()
    for task in ("apply", "evaluate", "export", "finetune"):
        with pytest.raises(
            ConfigError, match=r"model\.checkpoint=files/net\.th, and that is gone: there is no /"
        ):
            options_of_run([f"task={task}", "run=../proj/runs/a"])
        own = options_of_run([f"task={task}", "run=../proj/runs/a", "model.checkpoint=own.th"])
        assert not any("net.th" in each for each in own)
    (project / "files" / "wide.th").unlink()
    options_of_run(["task=apply", "run=../proj/runs/a", "model.checkpoint=own.th"])  # which no teacher helps
    with pytest.raises(ConfigError, match=r"finetune\.teacher=files/wide\.th"):
        options_of_run(["task=finetune", "run=../proj/runs/a", "model.checkpoint=own.th"])


def test_a_plan_is_not_applied_to_a_network_trained_anew(project: Path) -> None:
    run = a_run("model=conv4")
    (run / "plan.json").touch()
    with pytest.raises(ConfigError, match=r"has no dense\.safetensors, the network that its plan is for"):
        options_of_run(["task=apply", "run=runs/a"])
    (run / "dense.safetensors").touch()
    assert f"model.checkpoint='{run / 'dense.safetensors'}'" in options_of_run(["task=apply", "run=runs/a"])


def test_a_file_that_was_put_elsewhere_is_named_to_the_resumed_run(project: Path) -> None:
    run = a_run("task=evaluate", "model=conv4", "model.checkpoint=files/net.th")
    (project / "files" / "net.th").rename(project / "files" / "kept.th")
    store_groups()
    with pytest.raises(ConfigError, match="is gone"):
        checked_arguments([f"resume={run}"])
    taken = checked_arguments([f"resume={run}", "model.checkpoint=files/kept.th"])
    assert taken is not None
    assert "model.checkpoint=files/kept.th" in taken


def test_the_same_network_is_measured_from_anywhere(
    rankrl: Command, refused: Refused, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target, checkpoint = small_network(project / "files")
    relative = f"model.checkpoint={Path(checkpoint.partition('=')[2]).relative_to(project)}"
    rankrl("task=evaluate", model, target, relative, "hydra.run.dir=runs/a", "tracking=none")
    known = read_json(Path("runs/a/metrics.json"))["baseline"]
    monkeypatch.chdir(project.parent / "other")
    rankrl("task=evaluate", "run=../proj/runs/a", "hydra.run.dir=b", "tracking=none")
    assert read_json(Path("b/metrics.json"))["baseline"] == known
    moved = project.rename(project.parent / "moved")
    rankrl("task=evaluate", f"run={moved / 'runs' / 'a'}", "hydra.run.dir=c", "tracking=none")
    assert read_json(Path("c/metrics.json"))["baseline"] == known
    (Path("c") / "metrics.json").unlink()
    rankrl("resume=c")
    assert read_json(Path("c/metrics.json"))["baseline"] == known
    shutil.rmtree(moved / "files")
    assert "is gone" in refused("task=evaluate", f"run={moved / 'runs' / 'a'}", "tracking=none")
    assert not list(Path().rglob("dense.safetensors"))


def test_modules_and_data_are_looked_for_where_the_run_did(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    monkeypatch.setenv("RANKRL_DATA", "restored afterwards")
    monkeypatch.delenv("RANKRL_DATA")
    Path("data").mkdir()
    a_run("plugins=[own_selectors]", "model=conv4")
    monkeypatch.chdir(project.parent / "other")
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path[1:]])
    resumed_arguments(["resume=../proj/runs/a"])
    assert sys.path[0] == str(project)
    assert os.environ.pop("RANKRL_DATA") == str(project / "data")
    moved = project.rename(project.parent / "moved")
    assert "plugins=[own_selectors]" in resumed_arguments([f"resume={moved / 'runs' / 'a'}"])
    assert sys.path[0] == str(moved)
    assert os.environ["RANKRL_DATA"] == str(moved / "data")
