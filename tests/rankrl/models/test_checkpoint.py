"""A checkpoint is loaded whole or refused with the reason; the network is untouched when it is refused."""

import argparse
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from decomposition import apply_plan, make_plan, save_compressed
from rankrl.data import load_dataset
from rankrl.errors import CheckpointError
from rankrl.models import (
    checkpoint_heldout,
    checkpoint_preprocessing,
    create_model,
    load_checkpoint,
    save_checkpoint,
)
from rankrl.training import report_accuracy

Change = Callable[[dict[str, torch.Tensor]], Any]


def network(name: str = "resnet20", classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return create_model(name, input_shape=(3, 32, 32), num_classes=classes)


def equal(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in one.state_dict().items())


def behind(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value for key, value in state.items()}


def noise(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is not to be loaded: the same shapes, all ones."""
    return {key: torch.ones_like(value) for key, value in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "best_prec1": 91.7, "epoch": 3},
        lambda state: {"state_dict": OrderedDict((f"module.{key}", value) for key, value in state.items())},
        lambda state: {key: value for key, value in state.items() if "num_batches_tracked" not in key},
        lambda state: {"model_state_dict": state, "optimizer_state_dict": {"state": {}}, "epoch": 3},
        lambda state: {
            "pytorch-lightning_version": "2.5.0",
            "state_dict": {f"model.{key}": value for key, value in state.items()}
            | {"loss.weight": torch.ones(10)},
        },
        lambda state: {"model": 1, "state_dict": {f"model._orig_mod.{k}": v for k, v in state.items()}},
        lambda state: {"n_averaged": torch.tensor(5), **behind("module.", state)},
        lambda state: {"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"net": state, "acc": 91.7, "epoch": 3},
        lambda state: {"model": noise(state), "ema": behind("module.", state), "updates": torch.tensor(9)},
        lambda state: {"model": noise(state), "model_ema": {"n_averaged": torch.tensor(5), **state}},
        lambda state: {"state_dict": behind("net.", state), "pytorch-lightning_version": "2.5"},
        lambda state: {"state_dict": {**behind("teacher.", noise(state)), **behind("self.net.", state)}},
        lambda state: {"network": {"weights": behind("module._orig_mod.", state)}},
        lambda state: {"params": noise(state), "params_ema": state},
        lambda state: {k.replace(".conv1.", "._fsdp_wrapped_module.conv1."): v for k, v in state.items()},
        lambda state: {k.replace("layer2.", "layer2.module._orig_mod."): v for k, v in state.items()},
        lambda state: {
            "state_dict": state,
            "optimizer": {"state": {0: {"step": torch.tensor(1.0), "momentum_buffer": torch.ones(3)}}},
        },
    ],
    ids=[
        "bare",
        "nested",
        "DataParallel",
        "without num_batches_tracked",
        "model_state_dict",
        "Lightning",
        "compiled",
        "AveragedModel",
        "timm",
        "net",
        "ema beside the model",
        "AveragedModel beside the model",
        "net of Lightning",
        "net of Lightning beside its teacher",
        "two dicts and two wrappers",
        "BasicSR",
        "FSDP",
        "layers wrapped",
        "optimizer beside it",
    ],
)
def test_weights_arrive_whatever_way_they_were_saved(tmp_path: Path, wrap: Change) -> None:
    source, target = network(seed=1), network(seed=2)
    torch.save(wrap(dict(source.state_dict())), tmp_path / "c.th")
    load_checkpoint(target, tmp_path / "c.th")
    assert equal(source, target)


def test_a_network_whose_own_names_begin_like_a_wrappers_keeps_them(tmp_path: Path) -> None:
    source, target = (nn.ModuleDict({"model": nn.Linear(2, 3)}) for _ in range(2))
    torch.save({"state_dict": source.state_dict()}, tmp_path / "c.pt")
    load_checkpoint(target, tmp_path / "c.pt")
    assert equal(source, target)


def test_of_several_networks_in_a_file_the_one_taken_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = dict(network(seed=1).state_dict())
    torch.save({"model": noise(state), "model_ema": state}, tmp_path / "c.pt")
    load_checkpoint(network(), tmp_path / "c.pt")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "its 'model_ema' and its 'model'; taken: its 'model_ema'" in record.getMessage()


def test_what_of_a_file_the_model_has_no_place_for_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)) for _ in range(2))
    caplog.set_level(logging.INFO)
    head = {"head.weight": torch.ones(5, 2), "head.bias": torch.ones(5), "n_averaged": torch.tensor(5)}
    torch.save({**behind("encoder.", dict(source.state_dict())), **head}, tmp_path / "c.pt")
    load_checkpoint(target, tmp_path / "c.pt")
    assert equal(source, target)
    assert caplog.messages[0].endswith("read the names that begin with 'encoder.', without n_averaged")
    assert caplog.messages[-1].endswith("no place for: head.weight, head.bias")


def test_a_tied_parameter_may_be_saved_under_one_of_its_names(tmp_path: Path) -> None:
    """accelerate and transformers write models so: `safetensors.torch.save_model` drops the others."""
    source, target = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
    for model in (source, target):
        model[2].weight = model[0].weight
    safetensors.torch.save_model(source, str(tmp_path / "model.safetensors"))
    assert len(safetensors.torch.load_file(tmp_path / "model.safetensors")) == 3
    load_checkpoint(target, tmp_path / "model.safetensors")
    assert equal(source, target)


def test_a_compressed_network_is_no_checkpoint_of_the_dense_one(tmp_path: Path) -> None:
    dense = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    plan = make_plan(dense, (16,), "tucker", ranks=2)
    save_compressed(apply_plan(dense, plan), plan, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"compressed network and its plan.*weights=\S+/model.safetensors"
    ):
        load_checkpoint(dense, tmp_path / "model.safetensors")


@pytest.mark.parametrize(("legacy", "suffix"), [(True, "th"), (False, "ckpt")])
def test_both_of_torchs_file_formats_are_read(tmp_path: Path, legacy: bool, suffix: str) -> None:
    source, target = network(seed=1), network(seed=2)
    torch.save(source.state_dict(), tmp_path / f"c.{suffix}", _use_new_zipfile_serialization=not legacy)
    load_checkpoint(target, tmp_path / f"c.{suffix}")
    assert equal(source, target)


def test_safetensors_come_back_as_they_were_even_from_channels_last(tmp_path: Path) -> None:
    source, target = network(seed=1).to(memory_format=torch.channels_last), network(seed=2)
    save_checkpoint(source, tmp_path / "model.safetensors")
    load_checkpoint(target, tmp_path / "model.safetensors")
    assert equal(source, target)
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == set(source.state_dict())


def test_equal_networks_have_equal_files(tmp_path: Path) -> None:
    known: dict[str, Any] = {"heldout": "abc", "preprocessing": {"mean": [0.5], "std": [0.25]}}
    for name in range(8):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "other.safetensors", **known)
        torch.manual_seed(0)
        save_checkpoint(nn.Linear(2, 2), tmp_path / f"{name}.safetensors", **known)
    contents = {(tmp_path / f"{name}.safetensors").read_bytes() for name in range(8)}
    assert len(contents) == 1
    assert checkpoint_heldout(tmp_path / "0.safetensors") == "abc"
    assert checkpoint_preprocessing(tmp_path / "0.safetensors") == known["preprocessing"]


def test_a_checkpoint_says_which_images_it_was_not_trained_on(tmp_path: Path) -> None:
    model, path = network(seed=1), tmp_path / "model.safetensors"
    save_checkpoint(model, path, heldout="abc")
    assert checkpoint_heldout(path) == "abc"
    load_checkpoint(model, path)
    save_checkpoint(model, path)
    assert checkpoint_heldout(path) is None
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert checkpoint_heldout(tmp_path / "model.pt") is None
    assert checkpoint_heldout(tmp_path / "missing.safetensors") is None


def test_half_precision_weights_are_converted(tmp_path: Path) -> None:
    source, target = network(seed=1), network(seed=2)
    state = {
        key: value.half() if value.is_floating_point() else value
        for key, value in source.state_dict().items()
    }
    torch.save(state, tmp_path / "c.pt")
    load_checkpoint(target, tmp_path / "c.pt")
    assert target.get_parameter("conv1.weight").dtype == torch.float32
    torch.testing.assert_close(target.get_parameter("conv1.weight"), state["conv1.weight"].float())


def set_value(state: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**state, key: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: torch.zeros(3), "holds a Tensor, not a state_dict"),
        (lambda state: {"epoch": 3}, "no state_dict.*'epoch'"),
        (lambda state: {}, "it holds nothing"),
        (lambda state: {"model": 3, "epoch": 1}, "no state_dict.*'model'"),
        (lambda state: {"model": {}, "epoch": torch.tensor(1)}, "the file lacks conv1.weight.* and 9"),
        (
            lambda state: {"student": state, "teacher": state},
            "several networks that fit: its 'student' and its 'teacher'; save",
        ),
        (
            lambda state: {k.replace("linear.", "head."): v for k, v in state.items()},
            r"the file lacks linear\.weight, linear\.bias; the model lacks head\.weight, head\.bias\.",
        ),
        (
            lambda state: {f"encoder.{k}" if "linear" not in k else f"head.{k}": v for k, v in state.items()},
            r"\(read: the names that begin with 'encoder\.'\): the file lacks linear\.weight, linear\.bias\.",
        ),
        (lambda state: {"state_dict": state, "extra": nn.Linear(1, 1)}, "more than tensors and plain values"),
        (lambda state: {"state_dict": state, "best": np.float64(3)}, "more than tensors and plain values"),
        (lambda state: {"state_dict": state, "path": Path("x")}, "more than tensors and plain values"),
        (
            lambda state: set_value(state, "conv1.weight", torch.zeros(16, 1, 3, 3)),
            r"conv1\.weight \(16, 1, 3, 3\) for",
        ),
        (lambda state: {k: v for k, v in state.items() if k != "bn1.bias"}, r"the file lacks bn1\.bias"),
        (lambda state: set_value(state, "other.weight", torch.zeros(1)), r"the model lacks other\.weight"),
        (
            lambda state: set_value(state, "linear.bias", torch.full((10,), torch.nan)),
            r"linear\.bias holds NaN",
        ),
        (
            lambda state: set_value(state, "bn1.running_var", torch.full((16,), torch.inf)),
            "running_var holds NaN",
        ),
        (lambda state: set_value(state, "linear.bias", torch.zeros(10, dtype=torch.int64)), "is torch.int64"),
        (
            lambda state: set_value(state, "linear.bias", torch.zeros(10, dtype=torch.complex64)),
            "is torch.complex64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_network_stays(
    tmp_path: Path, change: Change, message: str
) -> None:
    model, before = network(seed=2), network(seed=2)
    torch.save(change(dict(network(seed=1).state_dict())), tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(model, tmp_path / "c.pt")
    assert equal(model, before)


def test_another_class_count_is_named(tmp_path: Path) -> None:
    torch.save(network(classes=100).state_dict(), tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="is for 100 classes, but the model has 10"):
        load_checkpoint(network(classes=10), tmp_path / "c.pt")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    torch.save(network("resnet32").state_dict(), tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"another architecture: the model lacks layer1\.3.* more"):
        load_checkpoint(network("resnet20"), tmp_path / "c.pt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.th", tmp_path):
        with pytest.raises(CheckpointError, match="there is no checkpoint file"):
            load_checkpoint(network(), path)


@pytest.mark.parametrize(("suffix", "legacy"), [("th", True), ("th", False), ("safetensors", False)])
def test_damaged_files_are_refused(tmp_path: Path, suffix: str, legacy: bool) -> None:
    model, path = network(), tmp_path / f"c.{suffix}"
    if suffix == "th":
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    else:
        save_checkpoint(model, path)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    noise = [generator.bytes(500) for _ in range(20)]
    for damaged in [b"", content[:10], content[: len(content) // 2], content[:-7], b"<html></html>", *noise]:
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(model, path)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "model", "file", "expected"),
    [
        ("cifar10", "resnet20", "cifar10-resnet20.th", 0.9173),
        ("cifar10", "resnet32", "cifar10-resnet32.th", 0.9263),
        ("cifar10", "resnet56", "cifar10-resnet56.th", 0.9339),
        ("cifar100", "resnet20", "cifar100-resnet20.pt", 0.6727),
    ],
)
def test_published_checkpoints_have_their_published_accuracy(
    data_folder: Path, checkpoint_folder: Path, dataset: str, model: str, file: str, expected: float
) -> None:
    data = load_dataset(dataset, root=data_folder)
    network = create_model(model, input_shape=data.input_shape, num_classes=data.classes)
    load_checkpoint(network, checkpoint_folder / file)
    assert report_accuracy(network, data.test, mean=data.mean, std=data.std) == expected
