"""Weights compensate for what is removed, and for what is rounded before them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from decomposition import DecompositionError, compensate
from decomposition.calibration.metric import RowFactor
from decomposition.fit import rounding
from decomposition.fit.refit import RIDGE, Solved, refit_to_patches
from decomposition.fit.rounding import compensated_weight
from decomposition.network.rounding import rounded_weight


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


def drawn(seed: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(50, columns, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return weight, inputs.T @ inputs / 50


def lost(change: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ri,...ij,rj->r", change, moments, change)


def per_row(change: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ri,rij,rj->r", change, moments, change)


@given(seed=st.integers(0, 500), bits=st.sampled_from([2, 3, 4, 7, 8]), columns=st.integers(1, 40))
@settings(max_examples=30)
def test_a_runtime_finds_the_same_integers(seed: int, bits: int, columns: int) -> None:
    weight, moments = drawn(seed, 6, columns)
    found = compensated_weight(weight, moments, bits)
    assert torch.allclose(rounded_weight(found, bits), found, rtol=0, atol=1e-12)
    assert torch.allclose(found.abs().amax(1), weight.abs().amax(1), rtol=0, atol=1e-12)
    # What goes through float32 on its way to a file is rounded alike.
    assert torch.allclose(rounded_weight(found.float(), bits), found.float(), rtol=0, atol=1e-6)


def test_outputs_change_less_than_with_plain_rounding() -> None:
    ratios = []
    for seed in range(20):
        weight, moments = drawn(seed, 16, 60)
        plain, better = (
            lost(weight - each, moments).sum()
            for each in (rounded_weight(weight, 4), compensated_weight(weight, moments, 4))
        )
        ratios.append(float(better / plain))
    assert max(ratios) < 0.5


@pytest.mark.parametrize("seed", range(5))
def test_it_lies_between_the_best_integers_and_the_nearest(seed: int) -> None:
    weight, moments = drawn(seed, 1, 4)
    scale = float(weight.abs().max()) / 3
    grid = torch.tensor(list(itertools.product(range(-3, 4), repeat=4)), dtype=torch.float64) * scale
    best = lost(weight - grid, moments).min()
    found = lost(weight - compensated_weight(weight, moments, 3), moments)[0]
    plain = lost(weight - rounded_weight(weight, 3), moments)[0]
    assert best - 1e-12 <= found <= plain


def test_many_columns_are_rounded_in_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moments = drawn(1, 4, 300)
    in_blocks = compensated_weight(weight, moments, 4)
    monkeypatch.setattr(rounding, "_BLOCK", 1000)
    assert torch.allclose(compensated_weight(weight, moments, 4), in_blocks)


def test_each_row_may_have_inputs_of_its_own() -> None:
    weight, _ = drawn(2, 5, 9)
    matrices = torch.stack([drawn(seed, 1, 9)[1] for seed in range(5)])
    # The order of columns is common to all rows, so that equal diagonals make both ways alike.
    matrices = matrices / matrices.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
    matrices = matrices / matrices.diagonal(dim1=1, dim2=2)[:, None, :]
    matrices = (matrices + matrices.transpose(1, 2)) / 2 + 0.1 * torch.eye(9, dtype=torch.float64)
    found = compensated_weight(weight, matrices, 4)
    assert (
        per_row(weight - found, matrices).sum() < per_row(weight - rounded_weight(weight, 4), matrices).sum()
    )


def test_columns_of_zeros_stay_zero_and_nothing_known_rounds_to_the_nearest() -> None:
    weight, moments = drawn(3, 6, 10)
    weight[:, 3] = 0
    assert not bool(compensated_weight(weight, moments, 4)[:, 3].any())
    assert torch.equal(compensated_weight(weight, None, 4), rounded_weight(weight, 4))
    nothing = torch.zeros(6, 10, dtype=torch.float64)
    assert torch.equal(compensated_weight(nothing, moments, 4), nothing)
    # Inputs that never come leave their columns as plain rounding does.
    silent = torch.zeros(10, 10, dtype=torch.float64)
    assert torch.allclose(compensated_weight(weight, silent, 4), rounded_weight(weight, 4))


@given(seed=st.integers(0, 500), count=st.integers(1, 30), columns=st.integers(2, 40), ridge=st.booleans())
@settings(deadline=None)
def test_few_inputs_serve_as_well_as_their_moments(seed: int, count: int, columns: int, ridge: bool) -> None:
    weight, _ = drawn(seed, 6, columns)
    weight[:, columns // 2] = 0
    rows = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    moments = rows.T @ rows + 0.1 * ridge * torch.eye(columns, dtype=torch.float64)
    expected = compensated_weight(weight, moments, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_BLOCK", 7)
        assert torch.allclose(compensated_weight(weight, RowFactor(rows, 0.1 * ridge), 4), expected)
