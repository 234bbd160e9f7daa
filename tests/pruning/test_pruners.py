"""Everything that the registry holds, and the criteria one by one."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from pruning import (
    ChannelGroup,
    PruningError,
    channel_groups,
    get_pruner,
    keep_share,
    list_pruners,
    register_pruner,
    removable_groups,
)
from pruning.testing import CriterionContract, MaskContract

Build = Callable[[str], nn.Module]
MASKS = [pruner.name for pruner in list_pruners() if pruner.is_mask]
CRITERIA = [each.name for each in list_pruners() if each.unit == "channels" and not each.is_mask]


def score(name: str, network: nn.Module, images: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    groups = removable_groups(channel_groups(network, images))
    scores: dict[str, torch.Tensor] = get_pruner(name).definition(network, groups, images, generator)
    return scores


def test_the_registry_holds_the_pruners_of_the_field() -> None:
    assert [pruner.name for pruner in list_pruners()] == [
        "apoz",
        "blocks",
        "first_k",
        "group_lasso",
        "hard_concrete",
        "magnitude",
        "random",
        "reconstruction",
    ]
    assert MASKS == ["group_lasso", "hard_concrete"]
    assert all(pruner.description for pruner in list_pruners())


def test_unknown_and_taken_names_are_refused() -> None:
    with pytest.raises(PruningError, match="unknown pruner 'l1'; choose among apoz, blocks, first_k"):
        get_pruner("l1")
    with pytest.raises(PruningError, match="'random' is registered already"):
        register_pruner("random", "again")(lambda: None)


class TestMasks(MaskContract):
    names = MASKS


class TestCriteria(CriterionContract):
    """Every registered criterion keeps the contract, on every network."""

    names = CRITERIA

    @pytest.fixture
    def network(self, network: nn.Module) -> nn.Module:
        return network

    @pytest.fixture
    def images(self, images: torch.Tensor) -> torch.Tensor:
        return images

    @pytest.fixture
    def groups(self, groups: Sequence[ChannelGroup]) -> Sequence[ChannelGroup]:
        return groups


def test_first_k_removes_the_first_channels(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    kept = keep_share(groups, score("first_k", network, images), 0.5)
    assert kept == {"conv1": [3, 4, 5], "conv2": [4, 5, 6, 7], "dense1": [5, 6, 7, 8, 9]}


def test_random_depends_on_the_seed(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    assert not torch.equal(
        score("random", network, images, 0)["conv1"], score("random", network, images, 1)["conv1"]
    )


def test_magnitude_is_the_relative_l1_norm_of_the_filters(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    norms = network.conv2.weight.detach().abs().sum((1, 2, 3))
    torch.testing.assert_close(score("magnitude", network, images)["conv2"], norms / norms.mean())


def test_magnitude_of_a_stream_is_the_mean_over_its_layers(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_b")
    layers = [network.conv1, network.layer1[0].conv2, network.layer1[1].conv2]
    norms = [layer.weight.detach().abs().sum((1, 2, 3)) for layer in layers]
    expected = torch.stack([row / row.mean() for row in norms]).mean(0)
    torch.testing.assert_close(score("magnitude", network, images)["conv1"], expected)


def test_apoz_counts_activations_that_are_not_zero() -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.ReLU(), nn.Conv2d(3, 2, 1))
    network[0].weight.data = torch.eye(3).view(3, 3, 1, 1)
    images = torch.ones(2, 3, 4, 4)
    images[:, 1] = -1  # never active
    images[0, 2] = -1  # active in half of the images
    torch.testing.assert_close(score("apoz", network, images)["0"], torch.tensor([1.0, 0.0, 0.5]))


def test_apoz_needs_calibration_inputs(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    for calibration in (None, images[:0]):
        with pytest.raises(PruningError, match="needs calibration inputs"):
            get_pruner("apoz").definition(network, groups, calibration, None)
