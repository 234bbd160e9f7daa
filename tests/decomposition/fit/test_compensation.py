"""Layers that make up for inputs that are gone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from decomposition import DecompositionError, compensate
from decomposition.fit.refit import RIDGE, Solved, refit_to_patches


def silence(present: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * present.to(x).reshape(1, -1, *[1] * (x.ndim - 2))


def least_squares(weight: torch.Tensor, patches: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The weight on the present columns by torch's QR solver, the ridge as further equations."""
    x, y = patches.double(), patches.double()[:, present]
    ridge = RIDGE * y.square().sum() / len(present)
    equations = torch.cat([y, ridge.sqrt() * torch.eye(y.shape[1], dtype=torch.float64)])
    right = torch.cat([x @ weight.double().T, ridge.sqrt() * weight.double()[:, present].T])
    return torch.linalg.lstsq(equations, right).solution.T


def test_a_linear_layer_gets_the_least_squares_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 4, bias=False))
    x = torch.randn(200, 6) @ torch.randn(6, 6)
    present = torch.tensor([True, False, True, True, False, True])
    found = compensate(layer, {"0": present}, x)[0].weight
    expected = least_squares(layer[0].weight.detach(), x, present)
    torch.testing.assert_close(found[:, present], expected.float(), rtol=1e-4, atol=1e-5)


def test_a_convolution_gets_the_least_squares_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(4, 3, 3, stride=2, padding=1, bias=False))
    x = F.conv2d(torch.randn(20, 4, 9, 9), torch.randn(4, 4, 3, 3), padding=1)
    present = torch.tensor([True, True, False, True])
    found = compensate(layer, {"0": present}, x)[0].weight.detach()[:, present]
    patches = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2).flatten(0, 1)
    expected = least_squares(layer[0].weight.detach().flatten(1), patches, present.repeat_interleave(9))
    torch.testing.assert_close(found.flatten(1), expected.float(), rtol=1e-3, atol=1e-5)


def test_a_channel_that_the_others_carry_is_not_missed() -> None:
    """The bias takes up what is constant, the weights what is proportional."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU())
    with torch.no_grad():
        network[0].weight[3], network[0].bias[3] = 2 * network[0].weight[0], 2 * network[0].bias[0]
        network[0].weight[2], network[0].bias[2] = 0, 1.5
    x = torch.randn(64, 2, 8, 8)
    present = torch.tensor([True, True, False, False])
    expected = network(x)
    fitted = compensate(network, {"2": present}, x)
    found = fitted[3](fitted[2](silence(present, fitted[1](fitted[0](x)))))
    lost = network[3](network[2](silence(present, network[1](network[0](x)))))
    assert (found - expected).norm() < 0.02 * (lost - expected).norm()


class NormOfSome(nn.Module):
    """The first layer norm of a network, of the present channels alone."""

    def __init__(self, norm: nn.Module, present: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.present = norm, present

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some, weight = x[..., self.present], self.norm.weight[self.present]
        y = torch.zeros_like(x)
        y[..., self.present] = F.layer_norm(some, weight.shape, weight, self.norm.bias[self.present])
        return y


def test_layers_are_fitted_behind_a_norm_that_will_have_fewer_channels() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    x, present = 2 * torch.randn(500, 6) + 1, torch.arange(8) > 3
    substitute = NormOfSome(copy.deepcopy(network[1]), present)
    fitted = compensate(network, {"2": present}, x, substitutes={"1": substitute})
    assert type(fitted[1]) is nn.LayerNorm
    assert torch.equal(fitted[1](x @ torch.eye(6, 8)), network[1](x @ torch.eye(6, 8)))
    with torch.no_grad():
        wanted = network(x)
        arriving = torch.cat([substitute(fitted[0](x))[:, present], torch.ones(500, 1)], 1)
        best = arriving @ torch.linalg.lstsq(arriving, wanted).solution
        errors = {
            name: (each[2](silence(present, substitute(each[0](x)))) - wanted).square().sum()
            for name, each in (("fitted", fitted), ("without", compensate(network, {"2": present}, x)))
        }
    with pytest.raises(DecompositionError, match="substitute for '9', which is no module"):
        compensate(network, {"2": present}, x, substitutes={"9": substitute})
    assert errors["fitted"] < 1.01 * (best - wanted).square().sum() < 0.9 * errors["without"]


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(2, 6),
    outputs=st.integers(1, 4),
    removed=st.data(),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_error_never_grows(
    channels: int, outputs: int, removed: st.DataObject, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Conv2d(channels, outputs, 3, bias=bias))
    x = F.conv2d(torch.randn(32, channels, 8, 8), torch.randn(channels, channels, 1, 1)) + 1
    present = torch.ones(channels, dtype=torch.bool)
    present[removed.draw(st.lists(st.integers(0, channels - 1), min_size=1, max_size=channels - 1))] = False
    arriving = silence(present, x)
    with torch.no_grad():
        wanted = layer(x)
        before = (layer(arriving) - wanted).square().mean()
        after = (compensate(layer, {"0": present}, x)(arriving) - wanted).square().mean()
    assert float(after) <= float(before) * (1 + 1e-4)


def test_later_layers_take_part_and_the_model_stays(small_net: nn.Module) -> None:
    before = copy.deepcopy(small_net.state_dict())
    images = torch.randn(256, 3, 10, 10)
    present = torch.arange(8) % 2 == 0
    fitted = compensate(small_net, {"3": present}, images)
    assert all(torch.equal(value, before[key]) for key, value in small_net.state_dict().items())
    assert not torch.equal(fitted[7].weight, small_net[7].weight)

    def without(network: nn.Sequential) -> torch.Tensor:
        return network.eval()[3:](silence(present, network[:3](images)))

    with torch.no_grad():
        wanted = small_net.eval()(images)
        half = copy.deepcopy(fitted)
        half[7] = small_net[7]
        errors = [float((without(network) - wanted).norm()) for network in (fitted, half, small_net)]
    assert errors[0] < errors[1] < errors[2]


def test_what_cannot_be_compensated_is_named() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=4), nn.Flatten(), nn.Linear(16, 2))
    x = torch.randn(8, 3, 2, 2)
    with pytest.raises(DecompositionError, match=r"layer '1' cannot be refitted .* choose among 0, 3"):
        compensate(network, {"1": torch.ones(1, dtype=torch.bool)}, x)
    with pytest.raises(DecompositionError, match=r"layer '3' has 16 input channels, its .* shape \(4,\)"):
        compensate(network, {"3": torch.ones(4, dtype=torch.bool)}, x)
    with pytest.raises(DecompositionError, match="calibration set is empty"):
        compensate(network, {}, x[:0])


def test_a_layer_that_receives_zeros_alone_has_no_error() -> None:
    layer, zeros = nn.Linear(6, 4), torch.zeros(40, 6)
    found = refit_to_patches("layer", layer, Solved(layer, 40), zeros, zeros, None, mean_absorbed=False)
    assert found.error == 0
