"""Masks learn which channels stay: group LASSO and hard-concrete gates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pruning import GroupLassoMask, HardConcreteMask, PruningError


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


PARAMETRISATIONS = ["log_alpha", "alpha"]
PENALTIES = ["sigmoid", "hard_sigmoid"]


@pytest.mark.parametrize("temperature", [0.05, 0.5, 2 / 3])
@pytest.mark.parametrize("log_alpha", [-3.0, -0.5, 0.0, 2.5])
def test_a_million_samples_are_open_as_often_as_the_formula_says(
    log_alpha: float, temperature: float
) -> None:
    torch.manual_seed(0)
    mask = HardConcreteMask(1_000_000, log_alpha, temperature)
    share = (mask.train().gates() > 0).double().mean()
    expected = 1 / (1 + math.exp(-(log_alpha - temperature * math.log(0.1 / 1.1))))
    assert float(mask.penalty()[0].detach()) == pytest.approx(expected, rel=1e-5)
    # Five standard deviations of a mean of a million draws.
    assert float(share) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 1e6))


@pytest.mark.parametrize("penalty_function", PENALTIES)
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@given(log_alpha=st.floats(-2.5, 2.5), temperature=st.floats(0.05, 0.2))
def test_the_gradient_of_the_penalty_agrees_with_finite_differences(
    parametrisation: str, penalty_function: str, log_alpha: float, temperature: float
) -> None:
    mask = HardConcreteMask(
        1, log_alpha, temperature, parametrisation=parametrisation, penalty_function=penalty_function
    ).double()
    mask.penalty().sum().backward()
    step = 1e-6
    values = []
    for shift in (step, -step):
        other = HardConcreteMask(
            1, 0.0, temperature, parametrisation=parametrisation, penalty_function=penalty_function
        ).double()
        other.location.data = mask.location.data + shift
        values.append(float(other.penalty().detach().sum()))
    assert float(mask.location.grad) == pytest.approx(
        (values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-8
    )


def test_the_gradient_of_a_sample_agrees_with_finite_differences() -> None:
    mask = HardConcreteMask(20, 0.0, temperature=0.5).double()

    def sample(location: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        mask.location.data.copy_(location.detach())
        return torch.func.functional_call(
            mask, {"location": location}, torch.ones(1, 20, dtype=torch.float64)
        )

    location = torch.linspace(-2, 2, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sample, (location,))


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_both_parametrisations_start_with_more_open_than_closed(parametrisation: str) -> None:
    mask = HardConcreteMask(4, parametrisation=parametrisation)
    torch.testing.assert_close(mask.log_alpha(), torch.full((4,), 2.5))
    assert float(mask.open_probability().detach().min()) > 0.9
    assert mask.open_units().all()


def test_gates_are_random_in_training_and_deterministic_at_evaluation() -> None:
    torch.manual_seed(0)
    mask = HardConcreteMask(100, 0.0, temperature=0.5)
    assert not torch.equal(mask.train().gates(), mask.gates())
    expected = (torch.sigmoid(mask.log_alpha()) * 1.2 - 0.1).clamp(0, 1)
    assert torch.equal(mask.eval().gates(), expected)


def test_gates_lie_in_the_unit_interval_with_mass_on_both_ends() -> None:
    torch.manual_seed(0)
    gates = HardConcreteMask(10_000, 0.0, temperature=0.5).gates()
    assert float(gates.min()) == 0.0
    assert float(gates.max()) == 1.0
    assert 0.1 < float(((gates > 0) & (gates < 1)).float().mean()) < 0.9


def test_a_small_temperature_makes_gates_nearly_binary() -> None:
    torch.manual_seed(0)
    mask = HardConcreteMask(10_000, 0.0)
    cold = mask.gates()
    mask.set_temperature(0.5)
    warm = mask.gates()
    cold_share, warm_share = (float(((g > 0) & (g < 1)).float().mean()) for g in (cold, warm))
    assert cold_share < 0.1 < warm_share


@pytest.mark.parametrize("penalty_function", PENALTIES)
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("location", [-math.inf, -1e30, -1e4, -0.0, 1e-30, 1e4, 1e30, math.inf])
def test_extreme_locations_give_finite_gates_penalties_and_gradients(
    location: float, parametrisation: str, penalty_function: str
) -> None:
    mask = HardConcreteMask(64, parametrisation=parametrisation, penalty_function=penalty_function)
    mask.location.data.fill_(location)
    gates = mask.train().gates()
    total = gates.sum() + mask.penalty().sum()
    total.backward()
    for value in (gates, mask.penalty(), mask.deterministic_gates(), mask.location.grad, mask.scores()):
        assert torch.isfinite(value).all()
    assert ((gates >= 0) & (gates <= 1)).all()


def test_uniform_draws_at_the_edge_give_finite_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in (0.0, 1 - 2**-24):
        monkeypatch.setattr(torch, "rand_like", lambda tensor, value=draw: torch.full_like(tensor, value))
        mask = HardConcreteMask(3, 0.0)
        gates = mask.sample()
        gates.sum().backward()
        assert gates.tolist() == [float(draw > 0)] * 3
        assert torch.isfinite(mask.location.grad).all()


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_not_a_number_is_reported_where_a_decision_is_taken(parametrisation: str) -> None:
    mask = HardConcreteMask(3, parametrisation=parametrisation)
    mask.location.data[0] = math.nan
    with pytest.raises(PruningError, match="1 of 3 gates of a HardConcreteMask are not finite"):
        mask.open_units()


def test_a_closed_unit_stays_closed_and_costs_nothing() -> None:
    mask = HardConcreteMask(3)
    mask.close(torch.tensor([False, True, False]))
    assert mask.train().gates()[1] == mask.eval().gates()[1] == mask.penalty()[1] == mask.scores()[1] == 0


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_freezing_binarises(parametrisation: str) -> None:
    mask = HardConcreteMask(3, parametrisation=parametrisation)
    log_alpha = torch.tensor([-5.0, 0.0, 5.0])
    mask.location.data = log_alpha if parametrisation == "log_alpha" else log_alpha.exp()
    assert mask.deterministic_gates().tolist() == pytest.approx([0.0, 0.5, 1.0])
    mask.freeze()
    assert mask.train().gates().tolist() == mask.eval().gates().tolist() == [0.0, 1.0, 1.0]
    assert not mask.location.requires_grad


def test_a_frozen_mask_survives_saving() -> None:
    mask = HardConcreteMask(3)
    mask.location.data[0] = -5.0
    mask.freeze()
    other = HardConcreteMask(3)
    other.load_state_dict(mask.state_dict())
    assert other.train().gates().tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_reopened_units_are_half_open(parametrisation: str) -> None:
    mask = HardConcreteMask(2, parametrisation=parametrisation)
    mask.location.data[0] = -9.0
    mask.close(torch.tensor([True, False]))
    mask.reopen(torch.tensor([True, True]))
    assert mask.deterministic_gates().tolist() == pytest.approx([0.5, 1.0], abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"gamma": 0.1},
        {"zeta": 1.0},
        {"parametrisation": "beta"},
        {"penalty_function": "tanh"},
        {"initial_log_alpha": math.inf},
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(PruningError):
        HardConcreteMask(3, **options)
