"""Bad input gets one paragraph and exit code 2, and leaves no run that looks finished."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_options import grouped
from command_line import refusal, small_network, task_refusal, values
from torch import nn

import rankrl
from decomposition import DecompositionError
from rankrl.cli import app
from rankrl.cli.config.checks import check_values
from rankrl.errors import ConfigError, DataError
from rankrl.models import create_model, save_checkpoint

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serch.episodes=3",), "Did you mean 'search.episodes'"),
        (("selector=ddgp",), "Did you mean 'ddpg'"),
        (("model=custom", "model.width=24"), "begin with a plus: did you mean '+model.width'?"),
        (("model=custom", "model.checkpont=a.th"), "Did you mean 'model.checkpoint'?"),
        (("model.width=24",), "Did you mean 'model.width' (model=resnet9)?"),
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
        (("dataset.heldout=100000",), "held"),
        (("model.checkpoint=missing.th",), "there is no file missing.th"),
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
        (lambda path: torch.save(_with_bias(torch.Tensor.to_sparse), path), "linear.bias is sparse"),
        (lambda path: torch.save(_with_bias(lambda bias: bias / 0), path), "linear.bias holds NaN"),
        (lambda path: torch.save(_state("resnet20", 7), path), "7 classes"),
    ],
)
def test_bad_checkpoints_are_refused(tmp_path: Path, make: Callable[[Path], None], expected: str) -> None:
    path = tmp_path / "weights.th"
    make(path)
    assert expected in task_refusal("task=evaluate", f"model.checkpoint={path}")


def _state(name: str, classes: int) -> dict[str, torch.Tensor]:
    return create_model(name, input_shape=(1, 8, 8), num_classes=classes).state_dict()


def _with_bias(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    state = _state("resnet20", 10)
    return {**state, "linear.bias": change(state["linear.bias"])}


def test_damaged_dataset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(b"PK\x03\x04 no archive")
    assert "broken.npz" in task_refusal("dataset=npz", f"dataset.path={path}")
    np.savez(path, x_train=np.zeros((8, 8, 8, 1), np.uint8), y_train=np.zeros(8, np.int64))
    assert "x_test" in task_refusal("dataset=npz", f"dataset.path={path}")


def test_full_disk_is_reported(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = create_model("conv4", input_shape=(1, 8, 8), num_classes=10)
    save_checkpoint(network, tmp_path / "w.safetensors")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decomposition.files.os.replace", full)
    message = refused("task=evaluate", "model=conv4", f"model.checkpoint={tmp_path / 'w.safetensors'}")
    assert "No space left on device" in message
    assert not list(tmp_path.rglob("metrics.json"))


def test_diverging_training_is_named(refused: Refused, tmp_path: Path) -> None:
    options = ("train.epochs=1", "train.optim.lr=1e30", "dataset.train_images=200")
    network = [each for each in small_network(tmp_path) if "checkpoint" not in each]
    message = refused("task=train", *network, *options)
    assert "epoch 1" in message


INSPECT = ("task=inspect", "model=conv4", "dataset=digits")


@pytest.mark.parametrize("others", [(), ("decomposition=tucker", "selector=greedy", "search.images=100")])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("+reward=weighted", "reward is chosen twice; choose it once, without a plus"),
        ("+finetune=full", "finetune is chosen twice; choose it once, without a plus"),
        ("seed=${nosuch}", "seed: Interpolation key 'nosuch' not found"),
        ("seed=${oc.env:NOSUCH}", "seed: Environment variable 'NOSUCH' not found"),
        ("budget.params='${oc.decode:${oc.env:NOSUCH}}'", "budget.params: Environment variable 'NOSUCH' not"),
        ("seed=${nosuch:3}", "seed: Unsupported interpolation type nosuch"),
        ("seed=${seed}", "seed: Recursive interpolation detected"),
        ("decomposition.nosuch=1", "the option 'decomposition.nosuch' is unknown"),
        ("~selector.name", "selector.name is missing; choose with selector=NAME"),
        ("~nosuch", "'nosuch' does not exist"),
        ("~decomposition=nosuch", "Could not delete 'decomposition=nosuch'"),
        ("+selector@foo=greedy", "the option 'foo' is unknown"),
        ("seed=${oc.decode:x", "cannot be parsed at 'seed=${oc.decode:x'"),
        ("model.checkpoint='a", "cannot be parsed at"),
        ("seed=${oc.decode:${oc.env:PATH}", "missing BRACE_CLOSE"),
        ("seed=range(a)", "mismatch type argument start"),
        ("seed=sum(1,2)", "Unknown function 'sum'"),
        ("hydra.nosuch=1", "To append to your config use +hydra.nosuch=1"),
        ("hydra.callbacks.mine._target_=A", "use +hydra.callbacks.mine._target_=A"),
        ("hydra=x", "No match in the defaults list"),
        ("hydra.job.env_copy=[NOSUCH]", "KeyError: 'NOSUCH'"),
    ],
)
def test_a_fault_is_named_whatever_else_is_given(others: tuple[str, ...], fault: str, expected: str) -> None:
    assert expected in refusal(fault, *others)


def test_a_value_that_a_later_one_replaces_is_resolved_all_the_same() -> None:
    assert "Environment variable 'NOSUCH' not found" in refusal("dataset=${oc.env:NOSUCH}", *INSPECT)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("hydra.sweeper.params={seed: '0,1'}", "use +hydra.sweeper.params="),
        ("hydra.sweeper.params=3", "Cannot assign int"),
        ("seed=range(0)", "stands for no value"),
        ("selector=glob(nosuch*)", "stands for no value"),
    ],
)
def test_what_no_job_can_be_made_of_is_refused_before_the_sweep(sweep: str, expected: str) -> None:
    assert expected in refusal("-m", "task=search", sweep)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-m", "--cfg", "job", "seed=0,1"), "Only one of --run, --multirun, --cfg"),
        (("--resolve", *INSPECT), "--resolve flag can only be used in conjunction with --cfg"),
        (("--shell-completion",), "Expecting one subcommand"),
        (("--experimental-rerun", "nosuch.pickle"), "a pickle can hold any program and is not run"),
        (("hydra.job_logging.root.level=NOSUCH", "hydra.run.dir=x", *INSPECT), "Unknown level: 'NOSUCH'"),
        (("+hydra.callbacks.mine._target_=nosuch.A", *INSPECT), "No module named 'nosuch'"),
        (("-m", "hydra.sweeper._target_=nosuch.A", "seed=0,1", *INSPECT), "Invalid plugin 'nosuch.A'"),
        (("-m", "budget.params=interval(0.4,0.6)"), "BasicSweeper does not support"),
        (("--config-dir", "nosuch", *INSPECT), "nosuch' not found"),
    ],
)
def test_what_hydra_itself_refuses_is_one_paragraph(
    refused: Callable[..., str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(*arguments)
    assert app.COMPLETE_ERRORS not in os.environ


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "+hydra.sweeper.params={seed: '0,1'}"),
        ("-m", "+hydra.sweeper.params.seed='0,1'"),
        ("-m", "model=glob(conv*)"),
        ("hydra/job_logging=disabled",),
        ("+hydra.callbacks.mine._target_=hydra.experimental.callbacks.LogJobReturnCallback",),
        ("calibration.images=${search.images}",),
        ("seed='${oc.decode:${oc.env:NOSUCH,3}}'",),
    ],
)
def test_what_hydra_offers_is_taken(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    others = ("task=search", f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}")
    assert app.checked_arguments([*others, *arguments]) is not None


def test_a_defect_of_a_task_keeps_its_traceback(
    rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "_run_task", broken)
    with pytest.raises(ZeroDivisionError):
        rankrl(*INSPECT)


def test_whoever_asks_for_complete_errors_gets_them(
    rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(app.COMPLETE_ERRORS, "1")
    with pytest.raises(ValueError, match="--resolve"):
        rankrl("--resolve", *INSPECT)


def _begun(*_: object, **__: object) -> Any:
    raise AssertionError("work has begun")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("search.episodes=0",), "search.episodes must be positive, got 0"),
        (("search.seconds=0",), "search.seconds must be positive, got 0.0; null means no limit"),
        (("search.patience=-1",), "search.patience must be positive"),
        (("search.workers=0",), "search.workers"),
        (("decomposition.format=foo",), "there is no tensor format 'foo'; choose from cp, "),
        (("decomposition.format=tuker",), "Did you mean 'tucker'?"),
        (("decomposition=auto", "decomposition.formats=[cp,tt]"), "there is no tensor format 'tt'"),
        (("decomposition.candidates=0",), "decomposition.candidates must be at least 1"),
        (("calibration.images=0",), "calibration.images must be at least 1"),
        (("budget.params=0.5", "budget.macs=0.5", "budget.bytes=0.5"), "at most two budgets"),
        (
            ("budget.params=0.5", "budget.macs=0.5", "selector=ddpg", "selector.action=rank"),
            "selector.action=rank keeps one budget, and budget.params and budget.macs are set",
        ),
        (
            ("selector=bayes", "selector.action=rank", "decomposition.channels=[0.5]"),
            "with decomposition.channels or decomposition.blocks what a layer costs depends on the next one",
        ),
        (
            ("selector=ddpg", "selector.action=rank", "budget.latency=0.5"),
            "between integers and floating point takes of budget.latency depends on the next one",
        ),
        (("selector=tpe", "reward=weighted"), "spends a budget and there is none"),
        (("selector=local", "reward=weighted"), "spends a budget and there is none"),
        (("selector=bayes", "selector.action=importance", "reward=amc"), "spends a budget and there is none"),
        (
            ("task=compare", "compare.selectors=[local,random]", "reward=weighted"),
            "spends a budget and there is none",
        ),
        (
            ("task=compare", "compare.selectors=[local,divergence]", "search.workers=2"),
            "'divergence' measures on images in this process: it goes neither with search.workers",
        ),
    ],
)
def test_options_are_refused_before_data_are_read(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("rankrl.cli.tasks.task_run.load_dataset", _begun)
    monkeypatch.setattr("rankrl.request.suited_multiple", _begun)
    assert expected in task_refusal(*arguments)


def test_a_run_is_refused_before_data_are_read(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.cli.tasks.task_run.load_dataset", _begun)
    assert "search.finalists must be at least 1" in refused("search.finalists=0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=search", "finetune.epochs=0"),  # of a fine-tuning that it leaves out anyway
        ("task=train", "train.optim.name=onnx_adam"),  # for which the options of the default, sgd, are none
        ("task=train", "train.optim.name='onnx_adagrad'", "+train.optim.options.epsilon=1e-5"),
    ],
)
def test_what_is_fine_gets_as_far_as_the_data(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def read(*_: object, **__: object) -> None:
        raise DataError("the data are read")

    monkeypatch.setattr("rankrl.cli.tasks.task_run.load_dataset", read)
    assert "the data are read" in task_refusal(*arguments)


def test_options_of_another_optimizer_are_refused_where_they_are_given() -> None:
    given = ("train.optim.name=onnx_adam", "+train.optim.options.momentum=0.9")
    with pytest.raises(ConfigError, match="'onnx_adam' has no option 'momentum'"):
        check_values(values("task=train", *given))


@pytest.mark.parametrize("budget", ["budget.params=0.0001", "budget.macs=0.0001", "budget.bytes=0.0001"])
def test_an_unreachable_budget_is_refused_before_the_network_is_trained(
    monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    monkeypatch.setattr("rankrl.module_compression.run_training", _begun)
    assert "the least is 0." in task_refusal("model=conv4", budget)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"selector": "ddgp"}, "Did you mean 'ddpg'?"),
        ({"episodes": 0}, "search.episodes must be positive"),
        ({"macs": 0.5, "selector": "ddpg", "selector_options": {"action": "rank"}}, "keeps one budget"),
        ({"decomposition": "tt"}, "there is no format 'tt'"),
        ({"params": 1e-5}, "the least is 0."),
        ({"skip": ["3"]}, "skip: no layer matches '3'; the layers are 0, 2."),
        ({"skip": ["0"], "params": 0.2}, "the least is 0."),
        ({"only": ["fc"]}, "only: no layer matches 'fc'; the layers are 0, 2."),
        ({"only": ["2"], "skip": ["2"]}, "the network has no layer that can be decomposed"),
        ({"selector": "bayes", "selector_options": {"candidats": 1}}, "Did you mean 'candidates'?"),
    ],
)
def test_a_search_from_python_is_refused_before_it_calibrates(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr("decomposition.choose.library.collect_moments", _begun)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises((ConfigError, DecompositionError)) as refusal:
        rankrl.search(
            model,
            score=lambda network: 0.0,
            inputs=torch.zeros(4, 3, 8, 8),
            **grouped(**{"params": 0.5, **options}),
        )
    assert expected in str(refusal.value)
