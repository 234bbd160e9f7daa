"""The surgery: removed networks equal masked ones, and are plain networks."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pruning import (
    ChannelGroup,
    GroupLassoMask,
    KeptChannels,
    MaskedNetwork,
    PruningError,
    keep_share,
    kept_inputs,
    remove_channels,
    untrained_copy,
)

few = settings(max_examples=4)
"""Examples for each of twelve networks, which follow the same paths whatever was drawn."""

Build = Callable[[str], nn.Module]


def random_kept(groups: Sequence[ChannelGroup], seed: int, share: float = 0.5) -> KeptChannels:
    generator = torch.Generator().manual_seed(seed)
    scores = {group.name: torch.rand(group.units, generator=generator) for group in groups}
    return keep_share(groups, scores, share)


def masked_output(masked: MaskedNetwork, kept: KeptChannels, images: torch.Tensor) -> torch.Tensor:
    masked = copy.deepcopy(masked).eval()
    masked.keep({group.name: group.units_of(kept) for group in masked.groups})
    return masked(images)


@pytest.fixture
def masked(network: nn.Module, images: torch.Tensor) -> MaskedNetwork:
    """The network under masks that are open."""
    return MaskedNetwork(network, images, GroupLassoMask)


@few
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_removed_equals_masked(
    network: nn.Module, masked: MaskedNetwork, images: torch.Tensor, seed: int, share: float
) -> None:
    kept = random_kept(masked.groups, seed, share)
    with torch.no_grad():
        removed = remove_channels(network, kept, images)(images)
        torch.testing.assert_close(removed, masked_output(masked, kept, images), atol=1e-5, rtol=1e-5)


@few
@given(seed=st.integers(0, 10_000))
def test_the_inputs_that_stay_are_those_of_the_smaller_layers(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor, seed: int
) -> None:
    kept = random_kept(groups, seed)
    staying, smaller = kept_inputs(network, kept, images), remove_channels(network, kept, images)
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear) or getattr(layer, "groups", 1) != 1:
            continue
        inputs = layer.weight[:, staying[name]] if name in staying else layer.weight
        rows = kept.get(name, list(range(len(layer.weight))))
        assert torch.equal(smaller.get_submodule(name).weight, inputs[rows])


@few
@given(seed=st.integers(0, 10_000))
def test_a_pruned_residual_stream_equals_one_silenced_after_every_activation(
    build: Build, images: torch.Tensor, seed: int
) -> None:
    network = build("resnet_option_a")
    units = torch.rand(16, generator=torch.Generator().manual_seed(seed)) < 0.6
    units[7] = True  # stage 1 keeps a channel
    silent = copy.deepcopy(network)
    kept = {}
    # Stage 1 sits in the middle of stage 2, which sits in the middle of stage 3.
    for stage, width in ((1, 4), (2, 8), (3, 16)):
        first = (16 - width) // 2
        stage_mask = units[first : first + width]
        silencer = stage_mask.float().view(1, -1, 1, 1)
        for block in (0, 1):
            silent.get_submodule(f"layer{stage}.{block}").register_forward_hook(
                lambda module, inputs, output, mask=silencer: output * mask
            )
            kept[f"layer{stage}.{block}.conv2"] = stage_mask.nonzero().flatten().tolist()
        if stage == 1:
            silent.layer1.register_forward_pre_hook(lambda module, inputs, mask=silencer: inputs[0] * mask)
            kept["conv1"] = stage_mask.nonzero().flatten().tolist()
    with torch.no_grad():
        smaller = remove_channels(network, kept, images)
        torch.testing.assert_close(smaller(images), silent(images), atol=1e-5, rtol=1e-5)


def test_a_pruned_block_interior_equals_one_silenced_before_its_reader(
    build: Build, images: torch.Tensor
) -> None:
    network = build("resnet_option_a")
    kept = [0, 3, 4]
    silencer = torch.zeros(1, 8, 1, 1)
    silencer[:, kept] = 1
    silent = copy.deepcopy(network)
    silent.layer2[0].conv2.register_forward_pre_hook(lambda module, inputs: inputs[0] * silencer)
    smaller = remove_channels(network, {"layer2.0.conv1": kept}, images)
    assert smaller.layer2[0].bn1.num_features == 3
    torch.testing.assert_close(smaller(images), silent(images), atol=1e-5, rtol=1e-5)


def test_the_layers_get_the_sizes_asked_for(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
) -> None:
    kept = random_kept(groups, seed=1)
    smaller = remove_channels(network, kept, images)
    for name, channels in kept.items():
        layer = smaller.get_submodule(name)
        outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        assert outputs == layer.weight.shape[0] == len(channels)


def test_nothing_removed_is_the_same_network(network: nn.Module, images: torch.Tensor) -> None:
    same = remove_channels(network, {}, images)
    assert torch.equal(same(images), network(images))
    assert [type(module) for module in same.modules()] == [type(module) for module in network.modules()]


def test_the_original_is_left_as_it_is(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
) -> None:
    before = copy.deepcopy(network.state_dict())
    smaller = remove_channels(network, random_kept(groups, seed=2), images)
    with torch.no_grad():
        for parameter in smaller.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_result_is_a_plain_network_whose_state_loads_into_its_like(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
) -> None:
    kept = random_kept(groups, seed=3)
    smaller = remove_channels(network, kept, images)
    assert type(smaller) is type(network)
    assert list(smaller.state_dict()) == list(network.state_dict())
    other = copy.deepcopy(network)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other = remove_channels(other, kept, images)
    other.load_state_dict(smaller.state_dict())
    assert torch.equal(other(images), smaller(images))


def test_a_pruned_network_trains(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
) -> None:
    network.get_parameter(next(name for name, _ in network.named_parameters())).requires_grad_(False)
    smaller = remove_channels(network, random_kept(groups, seed=4), images).train()
    smaller(images).sum().backward()
    frozen, *others = smaller.parameters()
    assert not frozen.requires_grad
    assert all(parameter.grad is not None for parameter in others)


def test_a_pruned_network_can_be_pruned_again(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
) -> None:
    once = remove_channels(network, random_kept(groups, seed=5, share=0.7), images)
    masked = MaskedNetwork(once, images, GroupLassoMask)
    kept = random_kept(masked.groups, seed=6, share=0.7)
    twice = remove_channels(once, kept, images)
    with torch.no_grad():
        torch.testing.assert_close(twice(images), masked_output(masked, kept, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "network_name",
    [  # with padding that is written anew, with grouped layers; the others only have other sizes
        *("resnet_option_a", "group_norm"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("densenet", "depthwise", "doubled_stream", "inverted_bottleneck", "plain_chain"),
                *("resnet_option_b", "shuffle", "squeeze_excite", "tokens", "unet"),
            )
        ),
    ],
)
def test_a_pruned_network_runs_in_onnxruntime(
    network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor, tmp_path: Path
) -> None:
    smaller = remove_channels(network, random_kept(groups, seed=7), images)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(smaller, (images,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    program.save(tmp_path / "pruned.onnx", external_data=False)
    session = onnxruntime.InferenceSession(tmp_path / "pruned.onnx")
    for batch_size in (3, 5):
        inputs = torch.randn(batch_size, 3, 16, 16)
        (output,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), smaller(inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("resnet18", "shufflenet_v2_x0_5", "vgg11_bn", "densenet121")
        ),
    ],
)
def test_torchvision_networks(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    network = getattr(models, name)(num_classes=10)
    if name == "vgg11_bn":
        network.classifier = nn.Linear(512 * 49, 10)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.5)
            module.bias.data.normal_(0, 0.5)
    network.eval()
    images = torch.randn(2, 3, 64, 64)
    masked = MaskedNetwork(network, images, GroupLassoMask)
    kept = random_kept(masked.groups, seed=8)
    with torch.no_grad():
        smaller = remove_channels(network, kept, images)
        torch.testing.assert_close(smaller(images), masked_output(masked, kept, images), atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in smaller.parameters()) < 0.7 * sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"conv9": [0]}, "layer 'conv9' cannot be pruned"),
        ({"bn1": [0]}, "layer 'bn1' cannot be pruned"),
        ({"conv1": []}, "layer 'conv1' would lose all of its 6 channels"),
        ({"conv1": [1, 0]}, r"\[1, 0\]; give a sorted list of distinct channel numbers from 0 to 5"),
        ({"conv1": [1, 1]}, "give a sorted list of distinct"),
        ({"conv1": [0, 6]}, "from 0 to 5"),
        ({"conv1": [-1, 0]}, "from 0 to 5"),
        ({"conv1": [True]}, "from 0 to 5"),
        ({"conv1": [0.0]}, "from 0 to 5"),
        ({"conv1": "0"}, "from 0 to 5"),
        ({"dense2": [0]}, "layer 'dense2' cannot be pruned: its channels are the network's output"),
    ],
)
def test_wrong_channels_are_refused(
    build: Build, images: torch.Tensor, kept: KeptChannels, message: str
) -> None:
    with pytest.raises(PruningError, match=message):
        remove_channels(build("plain_chain"), kept, images)


def test_coupled_layers_must_agree(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_b")
    with pytest.raises(
        PruningError, match=r"'layer1.0.conv2' keeps .* coupled with 'conv1', 'layer1.1.conv2'"
    ):
        remove_channels(network, {"conv1": [0, 1]}, images)
    stream = {name: [0, 1] for name in ("conv1", "layer1.0.conv2", "layer1.1.conv2")}
    assert remove_channels(network, stream, images).conv1.out_channels == 2


def test_it_has_the_widths_and_fresh_weights(build: Build, images: torch.Tensor) -> None:
    pruned = remove_channels(build("plain_chain"), {"conv1": [0, 2], "dense1": [1, 3, 5]}, images)
    before = {key: value.clone() for key, value in pruned.state_dict().items()}
    fresh = untrained_copy(pruned)
    for (name, old), new in zip(pruned.named_parameters(), fresh.parameters(), strict=True):
        assert old.shape == new.shape
        assert not torch.equal(old, new), name
    assert all(torch.equal(value, before[key]) for key, value in pruned.state_dict().items())
    assert not fresh.bn1.running_mean.any()


def test_the_seed_decides_and_the_global_generator_stays(build: Build) -> None:
    network = build("plain_chain")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = untrained_copy(network, 1), untrained_copy(network, 1), untrained_copy(network, 2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.conv1.weight, second.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_parameters_that_cannot_be_drawn_again_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

    with pytest.raises(PruningError, match=r"1 \(Scale\) cannot be drawn anew.*reset_parameters"):
        untrained_copy(nn.Sequential(nn.Linear(2, 2), Scale()))
