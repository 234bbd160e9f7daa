"""Which channels go together, and which layers must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
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
from pruning.groups import find_group

PAD = (0, 0, 0, 0, 2, 3)
Build = Callable[[str], nn.Module]


class Forward(nn.Module):
    """Two convolutions, a head and a function that combines them."""

    def __init__(self, function: Callable[[Forward, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.offset = nn.Parameter(torch.zeros(1, 8, 16, 16))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def obstacle(module: nn.Module, layer: str, images: torch.Tensor) -> str:
    with pytest.raises(PruningError, match=f"layer '{layer}' cannot be pruned") as caught:
        removable_groups(channel_groups(module, images), [layer])
    return str(caught.value)


def test_every_producer_is_in_exactly_one_group(network: nn.Module, images: torch.Tensor) -> None:
    layers = [name for group in channel_groups(network, images) for name in group.layers]
    expected = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]
    assert sorted(layers) == sorted(expected)


def test_only_the_output_layer_must_stay(network: nn.Module, images: torch.Tensor) -> None:
    groups = channel_groups(network, images)
    assert [g.obstacle for g in groups if g.obstacle] == ["its channels are the network's output"]


def test_a_chain_has_one_group_per_layer_read_by_the_next(build: Build, images: torch.Tensor) -> None:
    groups = channel_groups(build("plain_chain"), images)
    assert [(list(g.layers), list(g.readers)) for g in groups[:3]] == [
        (["conv1"], ["conv2"]),
        (["conv2"], ["dense1"]),
        (["dense1"], ["dense2"]),
    ]
    # A channel of conv2 is nine features of dense1 after flattening.
    assert groups[1].readers["dense1"] == tuple(unit for unit in range(8) for _ in range(9))


def test_the_option_a_stream_is_one_group_over_all_stages(build: Build, images: torch.Tensor) -> None:
    groups = channel_groups(build("resnet_option_a"), images)
    stream = groups[0]
    assert list(stream.layers) == ["conv1", *(f"layer{s}.{b}.conv2" for s in (1, 2, 3) for b in (0, 1))]
    assert stream.units == 16
    narrow, middle, wide = (stream.layers[f"layer{s}.0.conv2"] for s in (1, 2, 3))
    assert middle[2:6] == narrow
    assert wide[4:12] == middle
    assert all(len(group.layers) == 1 for group in groups[1:])


def test_option_b_gives_every_stage_a_stream_of_its_own(build: Build, images: torch.Tensor) -> None:
    groups = channel_groups(build("resnet_option_b"), images)
    assert list(find_group(groups, "layer2.0.conv2").layers) == [
        "layer2.0.conv2",
        "layer2.0.shortcut.0",
        "layer2.1.conv2",
    ]


def test_a_unit_can_be_several_channels_of_a_layer(build: Build, images: torch.Tensor) -> None:
    group = channel_groups(build("doubled_stream"), images)[0]
    assert group.layers == {"conv1": (0, 1, 2, 3), "conv2": (0, 1, 2, 3, 0, 1, 2, 3)}
    assert group.kept(torch.tensor([True, False, False, True])) == {"conv1": [0, 3], "conv2": [0, 3, 4, 7]}


def test_units_and_kept_channels_are_inverse(network: nn.Module, images: torch.Tensor) -> None:
    for group in channel_groups(network, images):
        units = torch.arange(group.units) % 3 != 1
        assert torch.equal(group.units_of(group.kept(units)), units)


def test_spare_reopens_the_best_unit_of_every_emptied_layer() -> None:
    group = ChannelGroup("a", 3, {"a": (0, 1), "b": (2, 0, 1)}, {})
    nothing, scores = torch.zeros(3, dtype=torch.bool), torch.tensor([0.1, 0.5, 0.9])
    assert group.spare(nothing, scores).tolist() == [False, True, False]
    # b keeps unit 2, and a gets its best one back.
    assert group.spare(torch.tensor([False, False, True]), scores).tolist() == [False, True, True]


def test_a_group_prints_its_layers_units_and_readers(build: Build, images: torch.Tensor) -> None:
    groups = channel_groups(build("plain_chain"), images)
    assert str(groups[0]) == "6 units of conv1 (6); read by conv2"
    assert "stays: its channels are the network's output" in str(groups[-1])


def test_the_model_is_left_as_it_is(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain").train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    channel_groups(network, images)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("function", "layer", "reason"),
    [
        (lambda m, x: m.head(m.second(m.second(m.first(x))).mean((2, 3))), "second", "called 2 times in one"),
        (lambda m, x: m.head(m.second(m.bn(m.bn(m.first(x)))).mean((2, 3))), "first", "'bn' is shared"),
        (lambda m, x: m.head(m.second(m.first(x)).amax((2, 3)).view(-1, 8)), "second", "view in"),
        (lambda m, x: m.head(m.second(m.first(x) + m.offset).mean((2, 3))), "first", "tensor 'offset'"),
        (lambda m, x: m.head(m.second(m.first(x).cumsum(1)).mean((2, 3))), "first", "cumsum in the network"),
        (lambda m, x: m.head(m.second(m.first(x).softmax(1)).mean((2, 3))), "first", "softmax"),
        (lambda m, x: m.head(m.second(m.first(x) / x.new_ones(8, 1, 1)).mean((2, 3))), "first", "div in"),
        (lambda m, x: m.head((y := m.first(x), m.second(y / y.size(1)))[1].mean((2, 3))), "first", "number"),
        (lambda m, x: m.head(m.second(torch.cat(m.first(x).split(4, 1), 1)).mean((2, 3))), "first", "split"),
        (lambda m, x: m.head(m.second(m.first(x)[:, range(8)]).mean((2, 3))), "first", "getitem"),
        (lambda m, x: m.head((F.pad(x, PAD) + m.second(m.first(x))).mean((2, 3))), "second", "padded inside"),
        (lambda m, x: m.head(m.second(m.first(x)).mean((2, 3), True).squeeze()), "second", "squeeze in"),
        (lambda m, x: m.first(x), "first", "network's output"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_pruned_are_named_with_the_reason(
    function: Callable[[Forward, torch.Tensor], torch.Tensor], layer: str, reason: str, images: torch.Tensor
) -> None:
    assert reason in obstacle(Forward(function).eval(), layer, images)


def test_tied_weights_stay(images: torch.Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1))
    network[1].weight = network[0].weight
    assert "shares a parameter with" in obstacle(network, "0", images)


def test_parametrised_weights_stay(images: torch.Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1))
    torch.nn.utils.parametrizations.weight_norm(network[0])
    with pytest.raises(PruningError, match="cannot be pruned"):
        removable_groups(channel_groups(network, images), ["0"])


def test_channels_that_enter_an_unknown_layer_stay(images: torch.Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LocalResponseNorm(3), nn.Conv2d(8, 4, 1))
    assert "goes through the layer '1' (LocalResponseNorm)" in obstacle(network, "0", images)


def test_linear_layers_along_another_axis_stay_and_the_channels_may_go(images: torch.Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(2), nn.Linear(256, 4), nn.Conv1d(8, 2, 1))
    groups = channel_groups(network, images)
    assert "'2' works along another axis" in obstacle(network, "2", images)
    assert find_group(groups, "0").readers == {"3": tuple(range(8))}


def test_sums_of_numbers_may_go(images: torch.Tensor) -> None:
    regressor = Forward(lambda m, x: m.head(m.second(m.first(x)).mean((2, 3)))[:, :1].squeeze(1) * 10 + 5)
    assert removable_groups(channel_groups(regressor, images), ["first", "second"])


def test_squeezing_other_axes_keeps_channels_apart(images: torch.Tensor) -> None:
    for squeezed in (lambda y: y.squeeze(-1).squeeze(-1), lambda y: torch.squeeze(y, (2, 3))):
        network = Forward(lambda m, x, s=squeezed: m.head(s(m.second(m.first(x)).mean((2, 3), True))))
        assert removable_groups(channel_groups(network, images), ["second"])


def test_a_layer_that_does_not_exist_is_an_error_that_lists_the_layers(
    build: Build, images: torch.Tensor
) -> None:
    groups = channel_groups(build("plain_chain"), images)
    with pytest.raises(PruningError, match=r"'bn1' cannot be pruned: .* choose among conv1, conv2, dense1"):
        removable_groups(groups, ["bn1"])


def test_a_network_without_a_layer_to_prune_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(PruningError, match="no layer can be pruned"):
        removable_groups(channel_groups(nn.Sequential(nn.ReLU()), images))


def test_networks_that_decide_by_values_and_wrong_inputs_are_refused(
    build: Build, images: torch.Tensor
) -> None:
    branching = Forward(lambda m, x: m.first(x) if x.sum() > 0 else x)
    with pytest.raises(PruningError, match=r"reads the values of a tensor by bool in .*\(test_selection"):
        channel_groups(branching, images)
    with pytest.raises(PruningError, match=r"fails on an example input of shape \(3, 1, 16, 16\)"):
        channel_groups(build("plain_chain"), images[:, :1])


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
