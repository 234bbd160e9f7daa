"""Which channels go together, and which layers must stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning import ChannelGroup, PruningError, channel_groups, removable_groups
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
    function: Callable[[Forward, torch.Tensor], torch.Tensor],
    layer: str,
    reason: str,
    images: torch.Tensor,
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
    with pytest.raises(
        PruningError, match=r"reads the values of a tensor by bool in .*\(test_channel_groups"
    ):
        channel_groups(branching, images)
    with pytest.raises(PruningError, match=r"fails on an example input of shape \(3, 1, 16, 16\)"):
        channel_groups(build("plain_chain"), images[:, :1])
