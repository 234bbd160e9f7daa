"""Where channels are followed to, and what is said where they are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning import (
    ChannelGroup,
    KeptChannels,
    PruningError,
    channel_groups,
    keep_share,
    kept_inputs,
    kept_norms,
    removable_groups,
    remove_channels,
)
from pruning.copies import copied
from pruning.groups import find_group

Function = Callable[["Between", torch.Tensor], torch.Tensor]


class Between(nn.Module):
    """A function between two convolutions of 12 channels, and its own layers and parameters."""

    def __init__(self, function: Function, read: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 12, 3, padding=1)
        self.after = nn.Conv2d(read, 4, 1)
        self.layer_norm = nn.LayerNorm(12)
        self.rms_norm = nn.RMSNorm(12)
        self.wide_norm = nn.LayerNorm(read)
        self.pixel_norm = nn.LayerNorm(16)
        self.image_norm = nn.LayerNorm([16, 12])
        self.odd_norm = OddNorm(12)
        self.group_norm = nn.GroupNorm(4, 12)
        self.one_group = nn.GroupNorm(1, 12)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=3)
        self.tied = nn.Conv2d(12, 12, 1)
        self.excite = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.register_buffer("offset", torch.rand(1, 12, 1, 1))
        self.map = nn.Parameter(torch.rand(12, 16, 16))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self, self.before(x)))


class OddNorm(nn.LayerNorm):
    """A layer norm that does not take its own size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (12,), self.weight, self.bias, self.eps)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)


def over_channels(norm: Callable[[torch.Tensor], torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return norm(y.movedim(1, -1)).movedim(-1, 1)


def unpacked_halves(m: Between, y: torch.Tensor) -> torch.Tensor:
    first, second = y.split(y.shape[1] // 2, dim=1)
    return torch.cat([second, first], 1)


def regrouped(m: Between, y: torch.Tensor) -> torch.Tensor:
    """What einops writes for `b (g c) h w -> b (c g) h w` with three groups."""
    n, _, h, w = y.shape
    return y.reshape(n, 3, -1, h, w).permute(0, 2, 1, 3, 4).reshape(n, -1, h, w)


def in_heads(m: Between, y: torch.Tensor) -> torch.Tensor:
    """Heads of four channels, of which whole ones can go."""
    n, _, h, w = y.shape
    return y.reshape(n, -1, 4, h, w).flip(2).flatten(1, 2)


def written_in_place(m: Between, y: torch.Tensor) -> torch.Tensor:
    y += 1
    y.mul_(m.scale.view(-1, 1, 1)).clamp_(min=0)
    return y


def excited(m: Between, y: torch.Tensor) -> torch.Tensor:
    """The squeeze and excitation as it is mostly written."""
    n, c, _, _ = y.size()
    weights = m.excite(F.adaptive_avg_pool2d(y, 1).view(n, c)).sigmoid().view(n, c, 1, 1)
    return y * weights.expand_as(y)


FOLLOWED: dict[str, tuple[Function, int, int]] = {
    # What is done between the layers, the channels that the second one reads, the units that can go.
    "list of chunks": (lambda m, y: torch.cat(list(y.chunk(2, 1))[::-1], 1), 12, 6),
    "unpacked halves": (unpacked_halves, 12, 6),
    "three chunks": (lambda m, y: sum(y.chunk(3, 1)), 4, 4),
    "stacked chunks": (lambda m, y: torch.stack(y.chunk(2, 1)).mean(0), 6, 6),
    "regrouped with -1": (regrouped, 12, 4),
    "heads": (in_heads, 12, 3),
    "pixel shuffle": (lambda m, y: F.pixel_shuffle(y, 2), 3, 3),
    "pixel unshuffle": (lambda m, y: F.pixel_unshuffle(y, 2), 48, 12),
    "squeeze and excitation": (excited, 12, 12),
    "reversed": (lambda m, y: y.flip(1), 12, 12),
    "rolled pixels": (lambda m, y: y.roll((1, 2), (2, 3))[..., ::2, None, :].squeeze(3), 12, 12),
    "transposed pixels": (lambda m, y: torch.stack(y.unbind(2), 3).mT, 12, 12),
    "flattened and back": (lambda m, y: y.flatten(2).view(*y.shape[:2], 16, 16), 12, 12),
    "whole groups of a norm": (lambda m, y: m.group_norm(y), 12, 4),
    "whole groups of a convolution": (lambda m, y: m.grouped(y).relu(), 24, 3),
    "groups of both": (lambda m, y: m.grouped(m.group_norm(y)), 24, 1),
    "layer norm": (lambda m, y: over_channels(m.layer_norm, y), 12, 12),
    "RMS norm": (lambda m, y: over_channels(m.rms_norm, y), 12, 12),
    "two norms": (lambda m, y: over_channels(m.rms_norm, over_channels(m.layer_norm, y).relu()), 12, 12),
    "a norm of halves, swapped": (lambda m, y: over_channels(m.wide_norm, unpacked_halves(m, y)), 12, 6),
    "a norm of a stack": (lambda m, y: over_channels(m.wide_norm, torch.cat([y, y.abs()], 1)), 24, 12),
    "a norm of pixels": (lambda m, y: m.pixel_norm(y), 12, 12),
    "a scale and a buffer": (lambda m, y: y * m.scale[:, None, None] + m.offset, 12, 12),
    "in place": (written_in_place, 12, 12),
    "an autograd function": (lambda m, y: Swish.apply(y), 12, 12),
    "zeros of its shape": (lambda m, y: torch.maximum(y, torch.zeros_like(y)), 12, 12),
    "the same shape": (lambda m, y: y.relu() + y if y.shape == y.relu().shape else y, 12, 12),
}

REFUSED: dict[str, tuple[Function, int, str]] = {
    "channels by number": (lambda m, y: y[:, :8], 8, r"getitem in the network.forward \(test_following"),
    "every other channel": (lambda m, y: y[:, ::2], 6, r"getitem .* takes its channels by places"),
    "a shuffle in fixed groups": (lambda m, y: F.channel_shuffle(y, 3), 12, "channel_shuffle in"),
    "literal sizes": (lambda m, y: y.view(-1, 3, 4, 16, 16).flatten(1, 2), 12, r"view .* line \d+\) takes"),
    "unpacked channels": (lambda m, y: torch.stack(list(y.unbind(1)), 1), 12, "unbind in"),
    "a norm over two axes": (
        lambda m, y: over_channels(m.image_norm, y),
        12,
        r"normalised together by the layer 'image_norm' \(LayerNorm\)",
    ),
    "a norm with constants": (
        lambda m, y: over_channels(lambda z: F.layer_norm(z, (12,)), y),
        12,
        "normalised together by layer_norm in the network.forward",
    ),
    "a norm of its own size": (lambda m, y: over_channels(m.odd_norm, y), 12, "normalised together by"),
    "a norm called twice": (
        lambda m, y: over_channels(m.layer_norm, over_channels(m.layer_norm, y).relu()),
        12,
        "'layer_norm' is shared: it is called 2 times",
    ),
    "a norm whose weight is used": (
        lambda m, y: over_channels(m.layer_norm, y) * m.layer_norm.weight.mean(),
        12,
        "'layer_norm.weight' is used by mean",
    ),
    "a norm of others too": (
        lambda m, y: over_channels(m.wide_norm, torch.cat([y, m.tied(y)], 1)),
        24,
        "'wide_norm' normalises its channels together with those of others",
    ),
    "one group": (lambda m, y: m.one_group(y), 12, "'one_group' normalises all of its channels together"),
    "a parameter of each place": (lambda m, y: y + m.map, 12, "combined with the tensor 'map'"),
    "a constant": (lambda m, y: y + torch.arange(12.0).view(-1, 1, 1), 12, "a tensor of fixed size by add"),
    "a scale by their number": (lambda m, y: y * y.shape[1] ** -0.5, 12, r"number of its channels is used"),
    "a scale by half of it": (lambda m, y: y / int(y.shape[1] / 2), 12, "number of its channels is used"),
    "a tensor of their number": (lambda m, y: y / torch.tensor(y.shape[1]), 12, "is used by tensor in"),
    "a lookup of their number": (lambda m, y: y * {12: 2.0}[y.shape[1]], 12, "number of its channels"),
    "the larger of two numbers": (lambda m, y: y * max(8, y.shape[1]), 12, "number of its channels"),
    "a check of their number": (lambda m, y: y if y.size(1) == 12 else -y, 12, "number of its channels"),
    "a weight of two uses": (
        lambda m, y: F.conv2d(m.tied(y), m.tied.weight.flip(0)),
        12,
        "'tied.weight' is used by flip in the network.forward",
    ),
    "a transform": (lambda m, y: torch.vmap(lambda z: z.cumsum(0))(y), 12, "cannot be followed"),
    "written into another tensor": (
        lambda m, y: torch.zeros_like(y).index_copy_(1, torch.arange(12), y),
        12,
        "index_copy",
    ),
    "set by index": (
        lambda m, y: (z := torch.zeros_like(y), z.__setitem__((slice(None), 0), y[:, 1]))[0],
        12,
        "setitem|getitem",
    ),
}  # fmt: skip


def silenced(network: nn.Module, kept: KeptChannels, images: torch.Tensor) -> nn.Module:
    """Return the network with zero weights on removed channels, and norms that leave them out."""
    silent = copied(network)
    for name, norm in kept_norms(network, kept, images).items():
        silent.set_submodule(name, norm)
    for name, staying in kept_inputs(network, kept, images).items():
        silent.get_submodule(name).weight.data[:, ~staying] = 0
    return silent


def halved(groups: list[ChannelGroup]) -> KeptChannels:
    generator = torch.Generator().manual_seed(0)
    scores = {group.name: torch.rand(group.units, generator=generator) for group in groups}
    return keep_share(groups, scores, 0.5)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FOLLOWED)
def test_channels_are_followed_and_their_removal_equals_zero_weights(name: str, images: torch.Tensor) -> None:
    function, read, units = FOLLOWED[name]
    network = Between(function, read).eval()
    group = find_group(channel_groups(network, images), "before")
    assert group.units == units
    if units == 1:
        return
    (found,) = removable_groups([group])
    kept = halved([found])
    smaller = remove_channels(network, kept, images)
    assert smaller.before.out_channels == 12 * round(units / 2) // units
    with torch.no_grad():
        expected = silenced(network, kept, images)(images)
        torch.testing.assert_close(smaller(images), expected, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(expected, network(images), atol=1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_channels_that_must_stay_are_refused_with_what_was_seen(name: str, images: torch.Tensor) -> None:
    function, read, reason = REFUSED[name]
    with pytest.raises(PruningError, match=reason):
        removable_groups(channel_groups(Between(function, read), images), ["before"])


def test_a_weight_that_is_used_by_other_code_stays(images: torch.Tensor) -> None:
    network = Between(lambda m, y: m.tied(y) * m.tied.weight.mean())
    with pytest.raises(PruningError, match=r"'tied.weight' is used by mean in the network.forward"):
        removable_groups(channel_groups(network, images), ["tied"])


def test_errors_of_a_network_name_its_line(images: torch.Tensor) -> None:
    def raising(m: Between, y: torch.Tensor) -> torch.Tensor:
        raise KeyError("levels")

    with pytest.raises(
        PruningError, match=r"fails on an example input .*\(test_following.*line \d+\): 'levels'"
    ):
        channel_groups(Between(raising), images)


@pytest.mark.parametrize("read", [float, bool, int, torch.Tensor.tolist, torch.Tensor.numpy])
def test_networks_that_read_values_are_refused_with_the_line(
    read: Callable[[torch.Tensor], object], images: torch.Tensor
) -> None:
    network = Between(lambda m, y: y if read(y.mean()) else -y)
    with pytest.raises(PruningError, match=r"reads the values of a tensor by .*test_following.*, line \d+"):
        channel_groups(network, images)


def test_values_of_parameters_may_be_read(images: torch.Tensor) -> None:
    network = Between(lambda m, y: y * float(m.scale.sum()) if m.scale.sum() > 0 else y)
    assert removable_groups(channel_groups(network, images), ["before"])


def test_hidden_features_of_an_mlp_over_tokens_can_go() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(), nn.Linear(16, 6), nn.LayerNorm(6)).eval()
    for tokens in (torch.randn(2, 6), torch.randn(2, 5, 6), torch.randn(2, 3, 4, 6)):
        groups = channel_groups(mlp, tokens)
        assert [(group.name, group.units) for group in removable_groups(groups)] == [("0", 16)]
        kept = {"0": [0, 3, 5, 15]}
        with torch.no_grad():
            torch.testing.assert_close(
                remove_channels(mlp, kept, tokens)(tokens), silenced(mlp, kept, tokens)(tokens)
            )


def randomised(network: nn.Module) -> nn.Module:
    """Give what is zero or one at first, or nearly so, values that matter."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and (tensor.ndim == 1 or "layer_scale" in name):
            tensor.data.uniform_(0.5, 1.5, generator=generator)
        elif name == "heads.head.weight":
            tensor.data.normal_(generator=generator)
    return network.eval()


@pytest.mark.parametrize(
    ("name", "removable"),
    [
        ("vit", "encoder.layers.encoder_layer_1.mlp.0"),
        ("shufflenet_v2_x0_5", "stage2.0.branch2.0"),
        ("mobilenet_v3_small", "features.4.block.0.0"),
        pytest.param("convnext_tiny", "features.6.1", marks=pytest.mark.slow),
        pytest.param("swin_t", "features.5.0.mlp.0", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "features.0.0", marks=pytest.mark.slow),
        pytest.param("regnet_y_400mf", "trunk_output.block2.block2-0.f.a.0", marks=pytest.mark.slow),
        pytest.param("resnext50_32x4d", "layer1.0.conv1", marks=pytest.mark.slow),
    ],
)
def test_networks_of_torchvision(name: str, removable: str) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    network = (
        models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
        if name == "vit"
        else getattr(models, name)(num_classes=10)
    )
    network, images = randomised(network), torch.randn(2, 3, 32, 32)
    groups = removable_groups(channel_groups(network, images))
    assert removable in [layer for group in groups for layer in group.layers]
    kept = halved(groups)
    with torch.no_grad():
        removed = remove_channels(network, kept, images)(images)
        expected = silenced(network, kept, images)(images)
        assert float((removed - expected).abs().max() / expected.abs().max()) < 1e-4
        assert float((network(images) - expected).abs().max() / expected.abs().max()) > 1e-2


def test_groups_of_a_resnet_are_those_of_torch_pruning() -> None:
    torch_pruning = pytest.importorskip("torch_pruning")
    models = pytest.importorskip("torchvision.models")
    network, images = models.resnet18(num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    groups = [group for group in channel_groups(network, images) if group.obstacle is None]
    graph = torch_pruning.DependencyGraph().build_dependency(network, images)
    names = {module: name for name, module in network.named_modules()}
    for group in groups:
        layer = network.get_submodule(group.name)
        theirs = graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, [0])
        members = [(names.get(each.target.module), each.handler.__name__) for each, _ in theirs]
        layers = {n for n, _ in members if n and not isinstance(network.get_submodule(n), nn.BatchNorm2d)}
        assert {n for n, cut in members if n in layers and cut == "prune_out_channels"} == set(group.layers)
        assert {n for n, cut in members if n in layers and cut == "prune_in_channels"} == set(group.readers)
