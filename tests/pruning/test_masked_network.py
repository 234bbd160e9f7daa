"""A network under masks: where gates act, how they close, and the way back to a plain network."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning import GroupLassoMask, HardConcreteMask, MaskedNetwork, PruningError
from pruning.masks import ChannelMask, GatedForward, gated_norm

Build = Callable[[str], nn.Module]
MASKS: list[type[ChannelMask]] = [GroupLassoMask, HardConcreteMask]


def with_random_gates(network: nn.Module, images: torch.Tensor, mask: type[ChannelMask]) -> MaskedNetwork:
    """Gates of every sign and size, about a third of them closed."""
    masked = MaskedNetwork(network, images, mask).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in masked.mask_parameters():
        parameter.data.normal_(0.5, 1.5, generator=generator)
    masked.trap(0.4)
    return masked


@pytest.mark.parametrize("mask", MASKS)
def test_masked_folded_and_removed_networks_agree(
    network: nn.Module, images: torch.Tensor, mask: type[ChannelMask]
) -> None:
    masked = with_random_gates(network, images, mask)
    joint_norms = any(group.norms for group in masked.groups)
    if joint_norms:  # a half open channel counts half in them
        masked.freeze()
    with torch.no_grad():
        expected = masked(images)
        if not joint_norms:  # a closed channel counts in them until it is gone
            torch.testing.assert_close(masked.folded()(images), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(masked.removed()(images), expected, atol=1e-5, rtol=1e-5)
    assert masked.open_fraction() < 1


def test_fresh_group_lasso_masks_change_nothing(network: nn.Module, images: torch.Tensor) -> None:
    masked = MaskedNetwork(network, images, GroupLassoMask).eval()
    assert torch.equal(masked(images), network(images))


def test_the_folded_network_has_the_state_and_types_of_the_original(
    network: nn.Module, images: torch.Tensor
) -> None:
    folded = with_random_gates(network, images, GroupLassoMask).folded()
    assert type(folded) is type(network)
    assert list(folded.state_dict()) == list(network.state_dict())
    assert not any(module._forward_pre_hooks for module in folded.modules())


def test_the_model_is_copied(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    before = copy.deepcopy(network.state_dict())
    masked = MaskedNetwork(network, images, GroupLassoMask)
    masked.constrain_norms()
    for parameter in masked.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_gates_come_after_batch_norm_activation_and_pooling(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask).eval()
    masked.keep({group.name: torch.arange(group.units) > 0 for group in masked.groups})
    received = {}
    for name in ("conv2", "dense1", "dense2"):
        masked.network.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: received.update({name: inputs[0]})
        )
    masked(images)
    assert not received["conv2"][:, 0].any()
    assert not received["dense1"][:, :9].any()
    assert not received["dense2"][:, 0].any()
    assert received["conv2"][:, 1:].any()


def test_all_readers_of_a_group_see_the_same_draw(build: Build, images: torch.Tensor) -> None:
    torch.manual_seed(0)
    masked = MaskedNetwork(build("resnet_option_a"), images, HardConcreteMask).train()
    scales: dict[str, torch.Tensor] = {}
    for name, gate in masked._readers.items():
        masked.network.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name, gate=gate: scales.update({name: gate.scale})
        )
    masked(images)
    stream = masked.groups[0]
    draw = dict(zip(stream.readers["linear"], scales["linear"].tolist(), strict=True))
    for name, row in stream.readers.items():
        assert scales[name].tolist() == [draw[unit] for unit in row]


def test_parameters_are_divided_between_network_and_masks(network: nn.Module, images: torch.Tensor) -> None:
    masked = MaskedNetwork(network, images, HardConcreteMask)
    ours, theirs = set(map(id, masked.mask_parameters())), set(map(id, masked.network_parameters()))
    assert not ours & theirs
    assert ours | theirs == set(map(id, masked.parameters()))


def test_masks_learn_through_the_network(network: nn.Module, images: torch.Tensor) -> None:
    masked = MaskedNetwork(network, images, GroupLassoMask)
    masked(images).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in masked.mask_parameters())


def test_a_copy_has_gates_of_its_own(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask).eval()
    other = copy.deepcopy(masked)
    for parameter in other.mask_parameters():
        parameter.data.zero_()
    assert not torch.equal(masked(images), other(images))


def test_state_survives_saving(build: Build, images: torch.Tensor) -> None:
    masked = with_random_gates(build("resnet_option_b"), images, GroupLassoMask)
    other = MaskedNetwork(build("resnet_option_b"), images, GroupLassoMask).eval()
    other.load_state_dict(masked.state_dict())
    assert torch.equal(masked(images), other(images))


def test_norms_take_the_statistics_of_open_channels_and_are_themselves_again_in_the_end(
    build: Build, images: torch.Tensor
) -> None:
    masked = MaskedNetwork(build("tokens"), images, GroupLassoMask).eval()
    names = ["stem_norm", "norm", "inner", "last"]
    received: dict[str, torch.Tensor] = {}
    for name in ("expand", "head"):
        masked.network.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: received.update({name: inputs[0]})
        )
    masked.keep({group.name: torch.arange(group.units) % 2 == 0 for group in masked.groups})
    masked.network.norm.weight.data.fill_(1.0)
    masked.network.norm.bias.data.zero_()
    masked(images)
    opened = received["expand"][..., masked.open_units()["stem"]]
    torch.testing.assert_close(opened.mean(-1), torch.zeros(3, 16), atol=1e-5, rtol=0)
    for plain in (masked.folded(), masked.removed()):
        assert all("forward" not in vars(plain.get_submodule(name)) for name in names)
    assert [masked.removed().get_submodule(name).normalized_shape for name in names] == [
        (4,),
        (4,),
        (6,),
        (4,),
    ]


@pytest.mark.parametrize("mask", MASKS)
def test_a_convnext_under_masks_is_the_one_that_is_removed(
    mask: type[ChannelMask], images: torch.Tensor
) -> None:
    convnext = pytest.importorskip("torchvision.models.convnext")
    torch.manual_seed(0)
    sizes = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)]
    network = convnext.ConvNeXt(sizes, layer_scale=1.0, num_classes=5).eval()
    masked = with_random_gates(network, images, mask)
    assert [group.name for group in masked.groups if group.norms] == ["features.0.0", "features.2.1"]
    masked.freeze()
    with torch.no_grad():
        expected = masked(images)
        torch.testing.assert_close(masked.removed()(images), expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(masked.folded()(images), expected, atol=1e-2)


def test_soft_gates_learn_through_the_statistics(build: Build, images: torch.Tensor) -> None:
    """The derivative by a location is that of finite differences, with gates between 0 and 1."""
    masked = MaskedNetwork(build("tokens"), images, HardConcreteMask, ["stem"]).eval().double()
    location = masked.masks[0].location
    location.data.copy_(torch.linspace(-1.5, 1.5, 8))

    def loss(values: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(masked, {"masks.0.location": values}, images.double())
        return output.square().sum()

    assert torch.autograd.gradcheck(loss, location.detach().requires_grad_())


def test_the_inner_network_cannot_be_called_by_mistake(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask)
    with pytest.raises(PruningError, match="call the MaskedNetwork"):
        masked.network(images)


def test_only_the_groups_of_named_layers_get_a_mask(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("resnet_option_a"), images, GroupLassoMask, ["layer1.0.conv1"])
    assert list(masked.kept_channels()) == ["layer1.0.conv1"]
    with pytest.raises(
        PruningError, match="'linear' cannot be pruned: its channels are the network's output"
    ):
        MaskedNetwork(build("resnet_option_a"), images, GroupLassoMask, ["linear"])


def test_the_penalty_is_the_weighted_sum_over_the_groups(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask)
    assert float(masked.penalty().detach()) == 6 + 8 + 10
    assert float(masked.penalty({"conv1": 2.0, "dense1": 0.0}).detach()) == 12 + 8
    for strengths in ({"conv9": 1.0}, {"conv1": -1.0}, {"conv1": float("nan")}):
        with pytest.raises(PruningError, match="give a factor of at least 0 for one of conv1, conv2, dense1"):
            masked.penalty(strengths)


@pytest.mark.parametrize("mask", MASKS)
def test_never_all_channels_of_a_layer_close(
    network: nn.Module, images: torch.Tensor, mask: type[ChannelMask]
) -> None:
    masked = MaskedNetwork(network, images, mask).eval()
    for parameter in masked.mask_parameters():
        parameter.data.fill_(-9.0 if mask is HardConcreteMask else 0.0)
    masked.trap(0.1)
    assert all(len(channels) >= 1 for channels in masked.kept_channels().values())
    assert masked.removed()(images).shape == (3, 5)
    for masks in masked.masks:
        assert masks.deterministic_gates().any()


def test_trapped_units_stay_closed(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask)
    masked.masks[0].weight.data[:2] = torch.tensor([0.01, -0.01])
    masked.trap(0.05)
    masked.masks[0].weight.data.fill_(1.0)
    assert masked.kept_channels()["conv1"] == [2, 3, 4, 5]


def test_a_limit_keeps_the_best_units(build: Build, images: torch.Tensor) -> None:
    masked = MaskedNetwork(build("plain_chain"), images, GroupLassoMask)
    masked.masks[0].weight.data = torch.tensor([0.1, -5.0, 0.2, 4.0, 3.0, 0.3])
    masked.limit(0.5)
    kept = masked.kept_channels()
    assert kept["conv1"] == [1, 3, 4]
    assert [len(kept[name]) for name in ("conv2", "dense1")] == [4, 5]
    with pytest.raises(PruningError, match=r"limit on kept channels must lie in \(0, 1\]"):
        masked.limit(0.0)


def test_freezing_binarises_hard_concrete_gates(build: Build, images: torch.Tensor) -> None:
    masked = with_random_gates(build("plain_chain"), images, HardConcreteMask)
    masked.freeze()
    assert all(set(mask.gates().tolist()) <= {0.0, 1.0} for mask in masked.train().masks)
    assert torch.equal(masked(images), masked(images)) is False  # dropout still draws
    masked.eval()
    torch.testing.assert_close(masked.removed()(images), masked(images), atol=1e-5, rtol=1e-5)


def test_gates_can_be_sampled_at_evaluation(build: Build, images: torch.Tensor) -> None:
    torch.manual_seed(0)
    masked = MaskedNetwork(build("plain_chain"), images, HardConcreteMask).eval()
    for parameter in masked.mask_parameters():
        parameter.data.zero_()
    assert torch.equal(masked(images), masked(images))
    with masked.sampled_gates():
        assert not torch.equal(masked(images), masked(images))
    assert torch.equal(masked(images), masked(images))


@pytest.mark.parametrize("mask", MASKS)
def test_constraining_norms_keeps_the_function(
    network: nn.Module, images: torch.Tensor, mask: type[ChannelMask]
) -> None:
    masked = MaskedNetwork(network, images, mask).eval()
    expected = masked(images)
    masked.constrain_norms()
    torch.testing.assert_close(masked(images), expected, atol=1e-5, rtol=1e-4)


def test_norms_are_projected_back_and_group_lasso_penalises_them(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    norms = network.conv2.weight.detach().transpose(0, 1).flatten(1).norm(dim=1)
    masked = MaskedNetwork(network, images, GroupLassoMask)
    masked.constrain_norms()
    # The factors are the norms of the columns: their L1 norm is the group LASSO on the reading weights.
    root_mean_square = norms.square().mean().sqrt()
    torch.testing.assert_close(masked.masks[0].weight.detach(), norms / root_mean_square)
    masked.network.conv2.weight.data.mul_(torch.rand(1, 6, 1, 1) + 0.5)
    masked.project_norms()
    held = masked.network.conv2.weight.detach().transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(held, root_mean_square.expand(6))


def test_projecting_needs_fixed_norms(build: Build, images: torch.Tensor) -> None:
    with pytest.raises(PruningError, match="call constrain_norms first"):
        MaskedNetwork(build("plain_chain"), images, GroupLassoMask).project_norms()


NORMS = {
    "layer": lambda: nn.LayerNorm(10, eps=1e-3),
    "rms": lambda: nn.RMSNorm(10),
    "plain": lambda: nn.LayerNorm(10),
}


def random_norm(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = NORMS[name]().to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def values(dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(4, 5, 10, generator=torch.Generator().manual_seed(1)) + 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gates_of_zero_and_one_give_the_norm_of_what_is_left(name: str, dtype: torch.dtype) -> None:
    norm, x = random_norm(name, dtype), values(dtype)
    keep = torch.arange(10) % 3 > 0
    gated = GatedForward(norm)
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    for presence, kept in ((torch.ones(10), slice(None)), (keep, keep), (0.25 * keep, keep)):
        gated.presence = presence
        weight, bias = norm.weight[kept], norm.bias[kept] if name != "rms" else None
        shape = (len(weight),)
        expected = (
            F.rms_norm(x[..., kept], shape, weight, norm.eps)
            if bias is None
            else F.layer_norm(x[..., kept], shape, weight, bias, norm.eps)
        )
        assert norm(x).dtype == dtype
        torch.testing.assert_close(norm(x)[..., kept], expected)


@pytest.mark.parametrize("centred", [True, False])
def test_it_is_differentiable_in_values_and_presence(centred: bool) -> None:
    x, presence = values(torch.float64)[0, :2].requires_grad_(), torch.rand(10).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: gated_norm(x, p, eps=1e-2, centred=centred), (x, presence))


def test_with_nothing_present_all_count() -> None:
    x = values(torch.float32)
    presence = torch.zeros(10, requires_grad=True)
    found = gated_norm(x, presence, eps=1e-5, centred=True)
    torch.testing.assert_close(found, F.layer_norm(x, (10,)))
    found.sum().backward()
    assert presence.grad is not None
    assert presence.grad.isfinite().all()


def test_a_forward_that_was_replaced_before_comes_back() -> None:
    norm = nn.LayerNorm(10)
    own = norm.forward
    for before in (own, lambda x: 2 * own(x)):
        norm.forward = before
        gated = GatedForward(norm)
        gated.presence = torch.ones(10)
        torch.testing.assert_close(norm(values(torch.float32)), before(values(torch.float32)))
        GatedForward.remove_from(norm)
        assert norm.forward == before
