"""The group LASSO mask."""

from __future__ import annotations

import pytest
import torch

from pruning import GroupLassoMask, PruningError


def test_it_multiplies_every_channel_by_its_factor() -> None:
    mask = GroupLassoMask(3)
    features = torch.randn(2, 3, 4, 5)
    assert torch.equal(mask(features), features)
    mask.weight.data = torch.tensor([0.5, 0.0, -2.0])
    assert torch.equal(mask(features), features * torch.tensor([0.5, 0.0, -2.0]).view(1, 3, 1, 1))
    assert torch.equal(mask(features[:, :, 0, 0]), features[:, :, 0, 0] * mask.weight)


def test_the_penalty_is_the_l1_norm_and_its_gradient_the_sign() -> None:
    mask = GroupLassoMask(3).double()
    mask.weight.data = torch.tensor([0.5, 0.2, -2.0], dtype=torch.float64)
    penalty = mask.penalty().sum()
    assert float(penalty.detach()) == pytest.approx(2.7)
    penalty.backward()
    for unit in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[unit] = 1e-6
        with torch.no_grad():
            up = (mask.weight + step).abs().sum()
            down = (mask.weight - step).abs().sum()
        assert float(mask.weight.grad[unit]) == pytest.approx(float(up - down) / 2e-6)


def test_a_closed_unit_stays_closed_whatever_the_optimizer_does() -> None:
    mask = GroupLassoMask(3)
    mask.close(torch.tensor([True, False, False]))
    mask.weight.data.fill_(5.0)
    assert mask.deterministic_gates().tolist() == [0.0, 5.0, 5.0]
    mask.penalty().sum().backward()
    assert mask.weight.grad.tolist() == [0.0, 1.0, 1.0]
    assert mask.scores().tolist() == [0.0, 5.0, 5.0]


def test_never_all_units_close() -> None:
    mask = GroupLassoMask(2)
    mask.close(torch.tensor([True, False]))
    with pytest.raises(PruningError, match="would close all 2"):
        mask.close(torch.tensor([False, True]))


def test_a_reopened_unit_is_open_with_its_sign() -> None:
    mask = GroupLassoMask(3)
    mask.weight.data = torch.tensor([0.0, -1e-5, 3.0])
    mask.close(torch.tensor([True, True, False]))
    mask.reopen(torch.tensor([True, True, True]))
    assert mask.open_units().all()
    assert mask.weight[1] < 0
    assert mask.weight[2] == 3.0


def test_freezing_keeps_the_factors_and_stops_learning() -> None:
    mask = GroupLassoMask(3)
    mask.weight.data = torch.tensor([0.5, 0.0, -2.0])
    mask.freeze()
    assert mask.alive.tolist() == [True, False, True]
    assert mask.deterministic_gates().tolist() == [0.5, 0.0, -2.0]
    assert not mask.weight.requires_grad


def test_diverged_factors_are_reported() -> None:
    mask = GroupLassoMask(3)
    mask.weight.data[1] = float("nan")
    with pytest.raises(PruningError, match="1 of 3 gates of a GroupLassoMask are not finite"):
        mask.open_units()


@pytest.mark.parametrize("units", [0, -1, 2.0, True])
def test_a_mask_needs_units(units: object) -> None:
    with pytest.raises(PruningError, match="positive number of units"):
        GroupLassoMask(units)


def test_features_must_have_one_channel_per_unit() -> None:
    with pytest.raises(PruningError, match=r"3 units got features of shape \(2, 4, 5, 5\)"):
        GroupLassoMask(3)(torch.randn(2, 4, 5, 5))
