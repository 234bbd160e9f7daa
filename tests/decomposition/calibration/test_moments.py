"""Input moments equal what a brute-force pass over all patches gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposition.calibration.moments import InputMoments, collect_moments
from decomposition.errors import DecompositionError
from decomposition.network.layers import compressible_layers

SHAPE = (3, 10, 10)


@pytest.fixture
def images() -> torch.Tensor:
    return 1 + torch.randn(12, *SHAPE, generator=torch.Generator().manual_seed(0))


def collect(model: nn.Module, calibration: object, **options: int) -> dict[str, InputMoments]:
    return collect_moments(model, compressible_layers(model, SHAPE), calibration, **options)  # type: ignore[arg-type]


def test_moments_equal_brute_force(small_net: nn.Sequential, images: torch.Tensor) -> None:
    moments = collect(small_net, images)
    small_net.eval()
    with torch.no_grad():
        hidden = small_net[:3](images)
        inputs = {
            "0": F.unfold(images, 3, padding=1).movedim(1, 2).reshape(-1, 27),
            "3": F.unfold(hidden, 3, stride=2).movedim(1, 2).reshape(-1, 72),
            "7": small_net[:7](images),
        }
    assert set(moments) == set(inputs)
    for name, patches in inputs.items():
        patches = patches.double()
        found = moments[name]
        assert found.count == len(patches)
        torch.testing.assert_close(found.mean, patches.mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.covariance, patches.T.cov(correction=0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            found.second_moment, patches.T @ patches / len(patches), rtol=1e-4, atol=1e-4
        )


def test_batches_and_one_tensor_give_the_same(small_net: nn.Module, images: torch.Tensor) -> None:
    whole, parts = collect(small_net, images), collect(small_net, iter(images.split(5)))
    for name, found in whole.items():
        assert parts[name].count == found.count
        torch.testing.assert_close(parts[name].covariance, found.covariance, rtol=1e-4, atol=1e-5)


def test_patches_are_limited_and_drawn_reproducibly(small_net: nn.Module, images: torch.Tensor) -> None:
    first, again, other = (
        collect(small_net, images.split(4), max_patches=60, seed=seed) for seed in (0, 0, 1)
    )
    assert first["0"].count == 60
    assert torch.equal(first["0"].covariance, again["0"].covariance)
    assert not torch.equal(first["0"].covariance, other["0"].covariance)


def test_a_layer_called_twice_sees_both_inputs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.relu(self.layer(x)))

    model = Twice()
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    found = collect_moments(model, compressible_layers(model, (4,)), x)["layer"]
    with torch.no_grad():
        both = torch.cat([x, torch.relu(model.layer(x))]).double()
    assert found.count == 60
    torch.testing.assert_close(found.mean, both.mean(0), rtol=1e-5, atol=1e-6)


def test_the_model_is_left_as_it_was(small_net: nn.Module, images: torch.Tensor) -> None:
    small_net.train()
    small_net[2].eval()
    before = {key: value.clone() for key, value in small_net.state_dict().items()}
    collect(small_net, images)
    assert all(torch.equal(value, before[key]) for key, value in small_net.state_dict().items())
    assert small_net.training
    assert not small_net[2].training
    assert not any(module._forward_pre_hooks for module in small_net.modules())


@pytest.mark.parametrize("calibration", [[], torch.empty(0, *SHAPE)], ids=["no batches", "no inputs"])
def test_an_empty_calibration_set_is_refused(small_net: nn.Module, calibration: object) -> None:
    with pytest.raises(DecompositionError, match="calibration set is empty"):
        collect(small_net, calibration)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_calibration_set_is_refused(
    small_net: nn.Module, images: torch.Tensor, bad: float
) -> None:
    images[-1, 0, 3, 3] = bad
    with pytest.raises(DecompositionError, match="calibration set holds NaN or infinite"):
        collect(small_net, images.split(5))
    assert not any(module._forward_pre_hooks for module in small_net.modules())


def test_a_layer_whose_inputs_overflow_is_named(small_net: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        small_net[1].weight.fill_(float("inf"))
    with pytest.raises(DecompositionError, match="layer '3': its inputs are not finite"):
        collect(small_net, images)


def test_features_that_vary_by_a_thousandth_of_their_mean_keep_their_covariance() -> None:
    rows = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(6, 6)
    rows = (rows + 1000 * torch.linspace(-2, 2, 6)) * torch.logspace(0, 2, 6)
    model = nn.Sequential(nn.Linear(6, 4))
    found = collect_moments(model, compressible_layers(model, (6,)), rows.sort(0).values.split(70))["0"]
    expected = np.cov(rows.sort(0).values.double().numpy().T, bias=True)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-4, atol=1e-5 * expected.max())
    np.testing.assert_allclose(found.mean, rows.double().numpy().mean(0), rtol=1e-9)
