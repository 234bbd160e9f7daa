"""What the run of a compressed network had for its network and its data need not be given again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankrl.cli.app import checked_arguments
from rankrl.cli.config.run_files import options_of_run
from rankrl.errors import ConfigError
from rankrl.files import write_json

RECORD = {
    "config": {"model": {"architecture": "custom", "checkpoint": None}, "dataset": {"name": "npz"}},
    "overrides": [
        *("task=pipeline", "model=custom", "model._target_=nets.Small", "+model.width=24", "seed=3"),
        *("finetune.epochs=3", "finetune.batch_size=8", "optim=sgd", "optim.lr=0.1"),
        *("model.checkpoint=gone.th", "dataset=npz", "dataset.path='own=1.npz'", "budget.params=0.5"),
    ],
}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    write_json(tmp_path / "state" / "configuration.json", RECORD)
    (tmp_path / "dense.safetensors").touch()
    return f"weights={tmp_path / 'model.safetensors'}"


def test_network_data_and_dense_weights_are_taken_but_for_those_given(weights: str, tmp_path: Path) -> None:
    checkpoint = f"model.checkpoint='{tmp_path / 'dense.safetensors'}'"
    model = ["model=custom", "model._target_=nets.Small", "+model.width=24"]
    dataset = ["dataset=npz", "dataset.path='own=1.npz'"]
    assert options_of_run([weights]) == [*model, checkpoint, *dataset]
    assert options_of_run([weights, "model=resnet20"]) == dataset
    assert options_of_run([weights, "model.checkpoint=a.th", "dataset=digits"]) == model
    assert options_of_run([weights, "dataset.path=b.npz", "--cfg", "job"]) == [
        *model,
        checkpoint,
        "dataset=npz",
    ]


def test_nothing_is_taken_where_no_single_run_is_meant(weights: str, tmp_path: Path) -> None:
    assert options_of_run([]) == []
    assert options_of_run([weights, "experiment=first_run"]) == []
    assert options_of_run(["-m", f"{weights},other.safetensors"]) == []
    assert options_of_run(["weights=null"]) == []
    (tmp_path / "state" / "configuration.json").write_text("{}")
    assert options_of_run([weights]) == []


def test_a_run_gives_what_the_task_needs(weights: str, tmp_path: Path) -> None:
    run, files = f"run={tmp_path}", (tmp_path / "model.safetensors", tmp_path / "plan.json")
    network = options_of_run([weights])
    dense = ["seed=3", *network]
    assert options_of_run(["task=evaluate", run]) == dense
    for path in files:
        path.touch()
    model, plan = f"weights='{files[0]}'", f"plan='{files[1]}'"
    assert options_of_run(["task=evaluate", run, "seed=4"]) == [*network, model]
    assert options_of_run(["task=export", run, "weights=own.safetensors"]) == dense
    assert options_of_run(["task=apply", run, "experiment=own"]) == ["seed=3", plan]
    recipe = ["finetune.batch_size=8"]
    assert options_of_run(["task=finetune", run, "optim=onnx_adam"]) == [*dense, *recipe, model]
    recipe = ["optim=sgd", "optim.lr=0.1", *recipe]
    assert options_of_run(["task=finetune", run]) == [*dense, *recipe, model]


def test_a_run_without_what_the_task_needs_is_refused(weights: str, tmp_path: Path) -> None:
    run = f"run={tmp_path}"
    with pytest.raises(ConfigError, match=r"has no model.safetensors, which task=export needs"):
        options_of_run(["task=export", run])
    with pytest.raises(ConfigError, match="there is no run of the command line"):
        options_of_run(["task=export", "run=nowhere"])
    with pytest.raises(ConfigError, match="run names one run"):
        options_of_run(["-m", "task=export", f"{run},other"])
    with pytest.raises(ConfigError, match="task=search takes nothing from an earlier run"):
        checked_arguments(["task=search", run])
