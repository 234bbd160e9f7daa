"""What the run of a compressed network had for its network and its data need not be given again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankrl.cli.config.input_files import network_of_weights
from rankrl.files import write_json

RECORD = {
    "config": {"model": {"architecture": "custom", "checkpoint": None}, "dataset": {"name": "npz"}},
    "overrides": [
        *("task=pipeline", "model=custom", "model._target_=nets.Small", "+model.width=24", "seed=3"),
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
    assert network_of_weights([weights]) == [*model, checkpoint, *dataset]
    assert network_of_weights([weights, "model=resnet20"]) == dataset
    assert network_of_weights([weights, "model.checkpoint=a.th", "dataset=digits"]) == model
    assert network_of_weights([weights, "dataset.path=b.npz", "--cfg", "job"]) == [
        *model,
        checkpoint,
        "dataset=npz",
    ]


def test_nothing_is_taken_where_no_single_run_is_meant(weights: str, tmp_path: Path) -> None:
    assert network_of_weights([]) == []
    assert network_of_weights([weights, "experiment=first_run"]) == []
    assert network_of_weights(["-m", f"{weights},other.safetensors"]) == []
    assert network_of_weights(["weights=null"]) == []
    (tmp_path / "state" / "configuration.json").write_text("{}")
    assert network_of_weights([weights]) == []
