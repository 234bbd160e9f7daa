"""Pruning to a target: every pruner meets it, repeats itself, and goes on where it was interrupted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decomposition import DecompositionError, apply_plan, count_macs, count_parameters
from pruning import PruningError, list_pruners
from rankrl.data import ImageData, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.errors import CheckpointError, ConfigError
from rankrl.models import create_model
from rankrl.models.zoo import BasicBlock
from rankrl.operations import KeepChannels, kept_channels
from rankrl.pruners.options import PruningOptions, pruning_options
from rankrl.pruners.prune import PrunedNetwork, check_target, prune_network

PRUNERS = [pruner.name for pruner in list_pruners() if pruner.unit == "channels"]
MASKS = [pruner.name for pruner in list_pruners() if pruner.is_mask]
QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 128}


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load_dataset("digits", seed=0, train_images=256)


@pytest.fixture(scope="module")
def calibration(data: ImageData) -> Tensor:
    return calibration_images(data, 64, seed=0)


class Residual(nn.Module):
    """The first two stages of a CIFAR ResNet, of one block each and half as wide."""

    def __init__(self, channels_in: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1, "A"))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2, "A"))
        self.linear = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.linear(x.mean((2, 3)))


def network(data: ImageData, name: str = "residual") -> nn.Module:
    torch.manual_seed(0)
    if name == "residual":
        return Residual(data.input_shape[0], data.classes).eval()
    return create_model(name, input_shape=data.input_shape, num_classes=data.classes).eval()


def quick(name: str, **target: Any) -> PruningOptions:
    target = {"params": None, "macs": None, **target}
    return settled(pruning_options(name, QUICK if name in MASKS else {}, **target))


def settled(options: PruningOptions) -> PruningOptions:
    return dataclasses.replace(options, training=dataclasses.replace(options.training, settling_epochs=1))


def forced(rewind: bool) -> PruningOptions:
    return settled(pruning_options("group_lasso", {**QUICK, "rewind": rewind}, params=None, macs=0.6))


Once = Callable[[PruningOptions], PrunedNetwork]


@pytest.fixture(scope="module")
def once(data: ImageData, calibration: Tensor) -> Once:
    """Prune the network with options, once for all tests that read what comes out."""
    known: dict[str, PrunedNetwork] = {}

    def pruned(options: PruningOptions) -> PrunedNetwork:
        if repr(options) not in known:
            known[repr(options)] = prune_network(network(data), data, options, calibration)
        return known[repr(options)]

    return pruned


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_meets_its_target(name: str, data: ImageData, once: Once) -> None:
    model, pruned = network(data), once(quick(name, macs=0.6))
    assert 0.5 < count_macs(pruned.network, data.input_shape) / count_macs(model, data.input_shape) <= 0.6
    assert pruned.plan.chosen_by == name
    assert pruned.network.training is False
    assert len(pruned.epochs) == (3 if name in MASKS else 0)
    assert (pruned.jump is not None) == (name in MASKS)
    reasons = {layer.name: layer.reason for layer in pruned.plan if layer.operation(KeepChannels) is None}
    assert reasons["linear"] == "its channels are the network's output"


@pytest.mark.parametrize(("name", "given"), [("magnitude", {}), ("group_lasso", {**QUICK, "rewind": True})])
def test_on_dense_weights_the_result_is_what_the_plan_makes_of_them(
    name: str, given: dict[str, Any], data: ImageData, calibration: Tensor, once: Once
) -> None:
    model = network(data)
    options = settled(pruning_options(name, given, params=None, macs=0.6))
    pruned = once(options)
    expected = apply_plan(model, pruned.plan, calibration)
    state = expected.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in pruned.network.state_dict().items())
    assert pruned.rewound == (True if name == "group_lasso" else None)
    plain = prune_network(model, data, dataclasses.replace(options, sequential=False), calibration)
    assert plain.plan == pruned.plan
    weights = [dict(network.named_parameters()) for network in (plain.network, pruned.network)]
    assert not torch.equal(*(each["layer1.0.conv2.weight"] for each in weights))


@pytest.mark.parametrize("better", [True, False])
def test_held_out_images_decide_between_trained_and_dense_weights(
    better: bool, data: ImageData, calibration: Tensor, once: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[nn.Module] = []

    def heldout_accuracy(network: nn.Module, its_data: ImageData) -> float:
        assert its_data is data
        measured.append(network)
        return float(better) if len(measured) == 2 else 0.5

    monkeypatch.setattr("rankrl.pruners.prune.heldout_accuracy", heldout_accuracy)
    model = network(data)
    chosen = prune_network(model, data, quick("group_lasso", macs=0.6), calibration)
    assert chosen.rewound == better
    expected = once(forced(better))
    assert len(measured) == 2
    assert expected.plan == chosen.plan
    state = expected.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in chosen.network.state_dict().items())


def test_weights_that_cannot_be_solved_for_stay_as_they_were_trained(
    data: ImageData, calibration: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> nn.Module:
        raise DecompositionError("not in one pass")

    monkeypatch.setattr("rankrl.pruners.prune.apply_plan", refuse)
    assert prune_network(network(data), data, quick("group_lasso", macs=0.6), calibration).rewound is False
    with pytest.raises(DecompositionError, match="not in one pass"):
        prune_network(network(data), data, forced(True), calibration)


def test_parameters_can_be_the_target(data: ImageData, calibration: Tensor) -> None:
    model = network(data, "conv4")
    pruned = prune_network(model, data, quick("magnitude", params=0.3), calibration)
    assert 0.25 < count_parameters(pruned.network) / count_parameters(model) <= 0.3


def test_channels_can_be_kept_in_multiples(data: ImageData, calibration: Tensor) -> None:
    options = pruning_options("reconstruction", {"multiple": 4}, params=None, macs=0.6)
    pruned = prune_network(network(data), data, options, calibration)
    kept = kept_channels(pruned.plan)
    assert kept
    assert all(len(channels) % 4 == 0 for channels in kept.values())


def test_only_the_named_layers_are_pruned(data: ImageData, calibration: Tensor) -> None:
    options = pruning_options("magnitude", {"layers": ["fc1"]}, params=0.8, macs=None)
    pruned = prune_network(network(data, "conv4"), data, options, calibration)
    assert set(kept_channels(pruned.plan)) == {"fc1"}


@pytest.mark.parametrize("name", PRUNERS)
def test_the_seed_decides_and_the_dense_network_stays_as_it_is(
    name: str, data: ImageData, calibration: Tensor, once: Once
) -> None:
    options, model, dense = quick(name, macs=0.6), network(data), network(data)
    first, second = once(options), prune_network(model, data, options, calibration)
    assert first.plan == second.plan
    before = dense.state_dict()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for one, two in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["magnitude", "group_lasso"])
def test_a_finished_pruning_is_read_back(
    name: str, data: ImageData, calibration: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pruned.safetensors"
    first = prune_network(network(data), data, quick(name, macs=0.6), calibration, state_file=file)
    monkeypatch.setattr("rankrl.pruners.prune.train_channel_masks", None)
    monkeypatch.setattr("rankrl.pruners.prune.keep_within", None)
    again = prune_network(network(data), data, quick(name, macs=0.6), calibration, state_file=file)
    assert (again.plan, list(again.epochs), again.jump) == (first.plan, list(first.epochs), first.jump)
    assert again.rewound == first.rewound
    state = again.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in first.network.state_dict().items())
    with pytest.raises(CheckpointError, match=r"kept was 0\.6, is now 0\.5"):
        prune_network(network(data), data, quick(name, macs=0.5), calibration, state_file=file)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_training_goes_on_after_its_last_epoch(
    name: str,
    data: ImageData,
    calibration: Tensor,
    once: Once,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(BaseException):
        pass

    options = quick(name, macs=0.6)
    whole = once(options)
    epochs = list[int]()

    def kill(epoch: Any) -> None:
        epochs.append(epoch.epoch)
        if len(epochs) == 2:
            raise Killed

    monkeypatch.setattr("rankrl.pruners.prune._log_epoch", kill)
    file = tmp_path / "pruned.safetensors"
    with pytest.raises(Killed):
        prune_network(network(data), data, options, calibration, state_file=file)
    again = prune_network(network(data), data, options, calibration, state_file=file)
    assert epochs == [0, 1, 1, 2]
    assert (again.plan, again.epochs, again.jump) == (whole.plan, whole.epochs, whole.jump)
    state = again.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in whole.network.state_dict().items())


class Shared(nn.Module):
    """A network whose only layer beside the head is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(1, 1, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.same(self.same(x)).flatten(1))


def test_what_cannot_be_pruned_is_refused_before_anything_else(data: ImageData) -> None:
    with pytest.raises(PruningError, match="'same' is shared: it is called 2 times"):
        check_target(Shared(), data.input_shape, quick("group_lasso"))
    with pytest.raises(PruningError, match=r"0\.0001 of the network's cannot be reached.*it is still 0\."):
        check_target(network(data), data.input_shape, quick("magnitude", macs=0.0001))
    options = pruning_options("magnitude", {"layers": ["linear"]}, params=None, macs=0.5)
    with pytest.raises(PruningError, match=r"layer 'linear' cannot be pruned: .*network's output"):
        check_target(network(data), data.input_shape, options)
    options = pruning_options("group_lasso", {"strengths": {"bn1": 1.0}}, params=None, macs=0.5)
    with pytest.raises(ConfigError, match=r"pruner\.strengths names 'bn1'; the channel groups are conv1, "):
        check_target(network(data), data.input_shape, options)


def test_options_reach_the_masks_and_their_training() -> None:
    given = {"strengths": {"conv1": 2.0}, "strength": 0.1, "lr": 0.1, "limit": 0.7, "epochs": 4}
    options = pruning_options("hard_concrete", given, params=0.4, macs=None, seed=3)
    assert (options.measure, options.kept, options.seed) == ("params", 0.4, 3)
    assert (options.training.strengths, options.training.strength) == ({"conv1": 2.0}, 0.1)
    assert (options.training.limit, options.training.epochs, options.steps.lr) == (0.7, 4, 0.1)
    assert options.mask == {}
    default = pruning_options("magnitude", {}, params=None, macs=None)
    assert (default.measure, default.kept) == ("macs", 0.5)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lasso", {}, "there is no pruner 'lasso'.*Did you mean 'group_lasso'"),
        ("magnitude", {"epochs": 3}, "'magnitude' has no option 'epochs'; it has layers, scope"),
        ("group_lasso", {"temperature": [1, 1]}, "has no option 'temperature'"),
        (
            "magnitude",
            {"scope": "globl"},
            "pruner.scope must be one of uniform, global.*Did you mean 'global'",
        ),
        ("magnitude", {"multiple": 0}, "pruner.multiple must be at least 1, got 0"),
        ("magnitude", {"layers": "conv1"}, "pruner.layers must be a list of names or null"),
        ("group_lasso", {"rewind": "no"}, "pruner.rewind must be true, false or null"),
        ("group_lasso", {"epochs": 0}, "epochs must be at least 1"),
        ("group_lasso", {"epochs": 1.5}, "pruner.epochs must be a whole number"),
        ("group_lasso", {"strengths": {"conv1": "x"}}, "pruner.strengths must be a mapping"),
        ("group_lasso", {"limit": 2.0}, "limit must lie in"),
        ("group_lasso", {"lr": -1.0}, "lr must be positive"),
    ],
)
def test_options_are_checked(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pruning_options(name, given, params=None, macs=None)


@pytest.mark.parametrize("target", [{"params": 0.5, "macs": 0.5}, {"params": 1.0}, {"macs": 0.0}])
def test_there_is_one_target_between_nothing_and_everything(target: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"one target|outside \(0, 1\)"):
        pruning_options("magnitude", {}, **{"params": None, "macs": None, **target})


def test_a_state_of_another_pruning_is_refused_by_name(
    data: ImageData, calibration: Tensor, tmp_path: Path
) -> None:
    file, options = tmp_path / "pruned.safetensors", quick("magnitude", macs=0.6)
    pruned = prune_network(network(data), data, options, calibration, state_file=file)
    again = prune_network(network(data), data, options, calibration, state_file=file)
    assert (again.plan, again.seconds) == (pruned.plan, pruned.seconds)
    ranked = dataclasses.replace(options, scope="global")
    with pytest.raises(CheckpointError, match="scope was 'uniform', is now 'global'"):
        prune_network(network(data), data, ranked, calibration, state_file=file)
