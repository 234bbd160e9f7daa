"""From scores to kept channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pruning import (
    ChannelGroup,
    PruningError,
    channel_groups,
    keep_share,
    keep_within,
    removable_groups,
    remove_channels,
)

Build = Callable[[str], nn.Module]
SCOPES = ["uniform", "global"]


def parameters(network: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in network.parameters()))


def random_scores(network: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    groups = removable_groups(channel_groups(network, images))
    return {group.name: torch.rand(group.units, generator=generator) for group in groups}


def test_a_uniform_share_is_taken_of_every_group_best_first(build: Build, images: torch.Tensor) -> None:
    groups = removable_groups(channel_groups(build("plain_chain"), images))
    scores = {g.name: torch.arange(g.units).remainder(2).float() for g in groups}
    kept = keep_share(groups, scores, 0.5)
    assert kept == {"conv1": [1, 3, 5], "conv2": [1, 3, 5, 7], "dense1": [1, 3, 5, 7, 9]}


def test_a_global_share_ranks_all_units_together_but_empties_no_layer(
    build: Build, images: torch.Tensor
) -> None:
    groups = removable_groups(channel_groups(build("plain_chain"), images))
    scores = {g.name: torch.full((g.units,), float(g.units)) for g in groups}
    kept = keep_share(groups, scores, 18 / 24, "global")
    assert [len(kept[name]) for name in ("conv1", "conv2", "dense1")] == [1, 8, 10]


@pytest.mark.parametrize("scope", SCOPES)
@given(fraction=st.floats(0.25, 1))
def test_the_cost_target_is_met_and_nearly_used_up(
    build: Build, images: torch.Tensor, scope: Literal["uniform", "global"], fraction: float
) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    scores = random_scores(network, images)
    kept = keep_within(network, images, groups, scores, parameters, fraction, scope)
    share = parameters(remove_channels(network, kept, images)) / parameters(network)
    # The step between two plans is what one more channel costs, in each group or in one.
    assert fraction - 0.3 <= share <= fraction


@pytest.fixture
def several_groups(build: Build, images: torch.Tensor) -> list[list[ChannelGroup]]:
    """Layers of 6, 8 and 10 channels; a stream of 4, 8 and 16."""
    networks = build("plain_chain"), build("resnet_option_a")
    return [removable_groups(channel_groups(network, images)) for network in networks]


@given(share=st.floats(0, 1), multiple=st.sampled_from([2, 4]), seed=st.integers(0, 1000))
def test_channels_are_kept_in_multiples(
    several_groups: list[list[ChannelGroup]], share: float, multiple: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for groups in several_groups:
        scores = {group.name: torch.rand(group.units, generator=generator) for group in groups}
        for scope in ("uniform", "global"):
            kept = keep_share(groups, scores, share, scope, multiple)
            exactly = keep_share(groups, scores, share, scope)
            for group in groups:
                for layer, row in group.layers.items():
                    count = len(kept[layer])
                    assert count % multiple == 0 or count == len(row)
                    assert count >= min(multiple, len(row))
                    if len(group.layers) == 1:
                        assert abs(count - len(exactly[layer])) <= max(multiple - 1, multiple // 2)


def test_a_target_is_met_in_multiples(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_a")
    groups = removable_groups(channel_groups(network, images))
    scores = {group.name: torch.rand(group.units) for group in groups}

    def cost(smaller: nn.Module) -> float:
        return macs_of(smaller, images.shape)

    kept = keep_within(network, images, groups, scores, cost, 0.6, "global", 4)
    assert cost(remove_channels(network, kept, images)) <= 0.6 * cost(network)
    assert all(len(channels) % 4 == 0 for channels in kept.values())
    with pytest.raises(PruningError, match="with 4 channels per layer"):
        keep_within(network, images, groups, scores, cost, 0.05, "global", 4)


def macs_of(network: nn.Module, shape: torch.Size) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network.eval()(torch.zeros(1, *shape[1:]))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    "name", ["resnet_option_a", pytest.param("resnet_option_b", marks=pytest.mark.slow), "plain_chain"]
)
def test_scores_per_cost_close_the_dearest_units_first(name: str, build: Build, images: torch.Tensor) -> None:
    """With equal scores, no unit that went saves less than one that stays; costs are counted one by one."""
    network = build(name)
    groups = removable_groups(channel_groups(network, images))

    def cost(smaller: nn.Module) -> float:
        return macs_of(smaller, images.shape)

    scores = {group.name: torch.ones(group.units) for group in groups}
    kept = keep_within(network, images, groups, scores, cost, 0.8, "per_cost")
    whole = cost(network)
    assert cost(remove_channels(network, kept, images)) <= 0.8 * whole
    saved: dict[bool, list[float]] = {True: [], False: []}
    for group in groups:
        staying = group.units_of(kept)
        # Units of the same layers save the same.
        kinds = {
            (bool(staying[unit]), *(row.count(unit) for row in group.layers.values())): unit
            for unit in range(group.units)
        }
        for unit in kinds.values():
            others = torch.arange(group.units) != unit
            alone = group.kept(others)
            if all(alone.values()):
                smaller = remove_channels(network, alone, images)
                saved[bool(staying[unit])].append(whole - cost(smaller))
    assert saved[False]
    assert min(saved[False]) >= 0.999 * max(saved[True])


def test_everything_is_kept_if_the_cost_allows_it(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_a")
    groups = removable_groups(channel_groups(network, images))
    kept = keep_within(network, images, groups, random_scores(network, images), parameters, 1.0)
    assert all(len(kept[name]) == len(row) for group in groups for name, row in group.layers.items())


def test_a_target_out_of_reach_names_the_smallest_that_is_not(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images), ["dense1"])
    scores = random_scores(network, images)
    with pytest.raises(
        PruningError, match=r"0.1 of the network's cannot be reached.* in dense1 it is still 0\.\d+"
    ):
        keep_within(network, images, groups, scores, parameters, 0.1)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_targets_outside_their_range_are_refused(build: Build, images: torch.Tensor, fraction: float) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    with pytest.raises(PruningError, match=r"must lie in \(0, 1\]"):
        keep_within(network, images, groups, random_scores(network, images), parameters, fraction)


def test_shares_scopes_and_scores_are_validated(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    scores = random_scores(network, images)
    with pytest.raises(PruningError, match=r"must lie in \[0, 1\], got 1.5"):
        keep_share(groups, scores, 1.5)
    with pytest.raises(PruningError, match="choose uniform or global"):
        keep_share(groups, scores, 0.5, "local")
    with pytest.raises(PruningError, match="multiples of at least 1, got 0"):
        keep_share(groups, scores, 0.5, multiple=0)
    with pytest.raises(PruningError, match="'conv1' needs 6 scores, got none"):
        keep_share(groups, {}, 0.5)
    with pytest.raises(
        PruningError, match="'conv2' needs 8 scores, got shape \\(8,\\), 1 of them not numbers"
    ):
        keep_share(groups, {**scores, "conv2": torch.tensor([float("nan"), *[1.0] * 7])}, 0.5)
