"""Bad input gets one paragraph and exit code 2, and leaves no run that looks finished."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refusal, small_network, task_refusal

from rankrl.models import create_model, save_checkpoint

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serch.episodes=3",), "Did you mean 'search.episodes'"),
        (("selector=ddgp",), "Did you mean 'ddpg'"),
        (("model=custom", "model.width=24"), "begin with a plus: did you mean '+model.width'?"),
        (("model=custom", "model.checkpont=a.th"), "Did you mean 'model.checkpoint'?"),
        (("model.width=24",), "It is one of model=resnet9"),
        (("model=resnet21",), "choose from"),
        (("task=inspect", "model=lenet5", "dataset=npz"), "dataset=npz needs dataset.path=VALUE"),
        (("model=custom",), "model=custom needs model._target_=VALUE"),
        (("task=piepline",), "Did you mean 'pipeline'"),
        (("search.episodes=many",), "search.episodes"),
        (("seed=",), "seed"),
        (("budget.params=[",), "cannot be parsed"),
        (("nonsense",), "cannot be parsed"),
        (("selector.hiden=[8]",), "selector.hiden"),
    ],
)
def test_options_are_refused_with_the_nearest_one(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("search.episods=3",), "Did you mean 'search.episodes'"),
        (("--resume", "runs/x"), "Options are written NAME=VALUE, without dashes"),
        (("resume=nowhere",), "no rankrl run in that folder"),
    ],
)
def test_a_refusal_is_one_paragraph(refused: Refused, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("budget.params=0",), r"budget.params=0.0 is outside (0, 1]"),
        (("budget.macs=-1",), r"outside (0, 1]"),
        (("finetune.epochs=-1",), "epochs must be a whole number >= 0"),
        (("task=finetune", "finetune.epochs=0"), "whole number >= 1"),
        (("finetune.schedule=cosin",), "Did you mean 'cosine'"),
        (("optim.lr=-1",), "lr must be positive"),
        (("search.metric=acuracy",), "metric must be one of"),
        (("export.batch=0",), "export.batch must be at least 1"),
        (("search.statistics=corected",), "Did you mean 'corrected'"),
        (("calibration.images=0",), "calibration.images must be at least 1"),
        (("dataset.heldout=100000",), "held"),
        (("model.checkpoint=missing.th",), "no checkpoint file missing.th"),
        (("task=apply",), "needs plan="),
        (("task=export",), "needs weights="),
        (("task=finetune", "weights=missing.safetensors"), "cannot be read"),
        (("dataset=cifar10",), "cifar10"),
    ],
)
def test_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("RANKRL_DATA", str(tmp_path / "no-data"))
    monkeypatch.setattr("torchvision.datasets.utils.download_url", _no_network)
    quick = ("train.epochs=2", "model=conv4") if "=cifar10" not in str(arguments) else ()
    assert expected in task_refusal(*quick, *arguments)
    assert not list(tmp_path.rglob("metrics.json"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("budget.params=1.5",), r"outside (0, 1]"),
        (("task=apply", "plan=missing.json"), "cannot be read"),
        (("task=evaluate",), "needs a trained network"),
    ],
)
def test_a_run_that_its_task_refuses_leaves_nothing(
    refused: Refused, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("model=conv4", *arguments)
    assert not list(tmp_path.rglob("metrics.json"))


def test_what_was_in_a_refused_runs_folder_stays(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused("task=evaluate", "hydra.run.dir=mine")
    assert (tmp_path / "mine" / "notes.txt").exists()
    refused("task=evaluate", "hydra.run.dir=deep/er/run")
    assert not (tmp_path / "deep").exists()


def _no_network(*_: object, **__: object) -> None:
    raise OSError("no network in tests")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.write_bytes(b"\x00garbage"), "damaged"),
        (lambda path: torch.save([1, 2], path), "not a state_dict"),
        (lambda path: torch.save({"state_dict": {"x": 1}}, path), "state_dict"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "refused"),
        (lambda path: torch.save(_state("resnet32", 10), path), "another architecture"),
        (lambda path: torch.save(_sparse(), path), "linear.bias is sparse"),
        (lambda path: torch.save(_state("resnet20", 7), path), "7 classes"),
    ],
)
def test_bad_checkpoints_are_refused(tmp_path: Path, make: Callable[[Path], None], expected: str) -> None:
    path = tmp_path / "weights.th"
    make(path)
    assert expected in task_refusal("task=evaluate", f"model.checkpoint={path}")


def _state(name: str, classes: int) -> dict[str, torch.Tensor]:
    return create_model(name, input_shape=(1, 8, 8), num_classes=classes).state_dict()


def _sparse() -> dict[str, torch.Tensor]:
    state = _state("resnet20", 10)
    return {**state, "linear.bias": state["linear.bias"].to_sparse()}


def test_damaged_dataset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(b"PK\x03\x04 no archive")
    assert "broken.npz" in task_refusal("dataset=npz", f"dataset.path={path}")
    np.savez(path, x_train=np.zeros((8, 8, 8, 1), np.uint8), y_train=np.zeros(8, np.int64))
    assert "x_test" in task_refusal("dataset=npz", f"dataset.path={path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_run_folder_is_refused(refused: Refused, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    (locked / "run").mkdir(parents=True)
    (locked / "run").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "cannot be written" in refused("task=evaluate", f"hydra.run.dir={locked / 'run'}")


def test_full_disk_is_reported(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = create_model("conv4", input_shape=(1, 8, 8), num_classes=10)
    save_checkpoint(network, tmp_path / "w.safetensors")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decomposition.files.os.replace", full)
    message = refused("task=evaluate", "model=conv4", f"model.checkpoint={tmp_path / 'w.safetensors'}")
    assert "No space left on device" in message
    assert not list(tmp_path.rglob("metrics.json"))


def test_nan_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    state = _state("resnet20", 10)
    state["layer1.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    torch.save(state, tmp_path / "nan.th")
    message = task_refusal("task=evaluate", f"model.checkpoint={tmp_path / 'nan.th'}")
    assert "layer1.0.conv1.weight" in message


def test_diverging_training_is_named(refused: Refused, tmp_path: Path) -> None:
    options = ("train.epochs=1", "train.optim.lr=1e30", "dataset.train_images=200")
    network = [each for each in small_network(tmp_path) if "checkpoint" not in each]
    message = refused("task=train", *network, *options)
    assert "epoch 1" in message
