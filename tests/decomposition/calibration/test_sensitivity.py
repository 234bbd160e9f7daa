"""Sensitivities: the Gauss-Newton matrix of the network's output, and what fits and budgets make of it."""

import numpy as np
import pytest
import torch
from torch import nn

from decomposition import (
    Budget,
    FitLibrary,
    FitOptions,
    allocate,
    apply_plan,
    collect_moments,
    collect_sensitivities,
    compressible_layers,
    fit_weight,
    get_format,
    list_formats,
    make_plan,
)
from decomposition.calibration.metric import floored
from decomposition.errors import DecompositionError
from decomposition.network.geometry import WeightModes

MODES = WeightModes((8,), (6,), 9)
TENSORISED = WeightModes((4, 2), (3, 2), 9)


def random_metric(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, 3 * size, generator=generator, dtype=torch.float64)
    return rows @ rows.T / size


def weighted_error(weight: torch.Tensor, fitted: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> float:
    rest, whole = (weight - fitted).flatten(1), weight.flatten(1)
    return float((torch.trace(g @ rest @ s @ rest.T) / torch.trace(g @ whole @ s @ whole.T)).sqrt())


def test_a_linear_network_has_the_exact_gauss_newton_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    specs = compressible_layers(model, (5,))
    found = collect_sensitivities(model, specs, torch.randn(20_000, 5, dtype=torch.float64))
    jacobian = model[1].weight.detach()
    torch.testing.assert_close(found["0"], jacobian.T @ jacobian, rtol=0.1, atol=0.02)
    torch.testing.assert_close(found["1"], torch.eye(3, dtype=torch.float64), rtol=0.1, atol=0.05)


def test_probabilities_count_by_their_logits() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(1, keepdim=True)

    torch.manual_seed(0)
    first, last = nn.Linear(6, 5), nn.Linear(5, 4)
    with torch.no_grad():
        last.weight *= 10
    x = torch.randn(64, 6)
    found = []
    for end in (nn.Softmax(1), Centred()):
        model = nn.Sequential(first, last, end)
        found.append(collect_sensitivities(model, compressible_layers(model, (6,)), x))
    assert float(nn.Sequential(first, last, nn.Softmax(1))(x).amax(1).median()) > 0.7
    for name in ("0", "1"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-6)


def test_positions_of_a_convolution_are_summed() -> None:
    """Behind a sum over positions every position has the same gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AvgPool2d(4, divisor_override=1), nn.Flatten())
    found = collect_sensitivities(model, compressible_layers(model, (2, 4, 4)), torch.randn(2000, 2, 4, 4))
    torch.testing.assert_close(found["0"], 16 * torch.eye(3, dtype=torch.float64), rtol=0.1, atol=1.5)


def test_the_model_is_left_as_it_was(small_net: nn.Module) -> None:
    small_net.train()
    small_net[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in small_net.state_dict().items()}
    collect_sensitivities(small_net, compressible_layers(small_net, (3, 10, 10)), torch.randn(8, 3, 10, 10))
    assert all(module.training for module in small_net.modules())
    assert [p.requires_grad for p in small_net.parameters()].count(False) == 1
    assert all(p.grad is None for p in small_net.parameters())
    for name, value in small_net.state_dict().items():
        assert torch.equal(value, before[name])


def test_layers_without_an_effect_are_left_out(small_net: nn.Module) -> None:
    with torch.no_grad():
        small_net[7].weight.zero_()
    specs = compressible_layers(small_net, (3, 10, 10))
    assert set(collect_sensitivities(small_net, specs, torch.randn(8, 3, 10, 10))) == {"7"}


@pytest.mark.parametrize("name", list_formats())
@pytest.mark.parametrize("tensorised", [False, True])
def test_a_weighed_fit_loses_less_where_it_counts(name: str, tensorised: bool) -> None:
    tensor_format = get_format(name)
    if tensorised and not tensor_format.tensorisable:
        pytest.skip(f"{name} has no tensorised form")
    modes = TENSORISED if tensorised else MODES
    weight = torch.randn(8, 6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    metric, sensitivity = random_metric(54, 2), random_metric(8, 3)
    sensitivity[:2] *= 5
    sensitivity[:, :2] *= 5
    ranks = tensor_format.expand(modes, 2)
    options = FitOptions(iterations=60)
    alike = fit_weight(tensor_format, weight, modes, ranks, metric, options)
    weighed = fit_weight(tensor_format, weight, modes, ranks, metric, options, sensitivity=sensitivity)
    errors = [
        weighted_error(weight, tensor_format.reconstruct(fit.cores, modes), sensitivity, metric)
        for fit in (alike, weighed)
    ]
    assert errors[1] < errors[0]
    raised = floored(sensitivity)  # what a fit minimises: G is only an estimate
    found = weighted_error(weight, tensor_format.reconstruct(weighed.cores, modes), raised, metric)
    assert weighed.error == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_scale_of_a_sensitivity_does_not_matter(scale: float) -> None:
    tucker = get_format("tucker")
    weight = torch.randn(8, 6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sensitivity = random_metric(8, 3)
    fits = [
        fit_weight(tucker, weight, MODES, (3, 3), sensitivity=factor * sensitivity) for factor in (1.0, scale)
    ]
    assert fits[0].error == pytest.approx(fits[1].error, rel=1e-6)


def test_a_sensitivity_that_is_not_finite_is_refused() -> None:
    broken = torch.full((8, 8), float("nan"), dtype=torch.float64)
    with pytest.raises(DecompositionError, match="sensitivity holds NaN"):
        fit_weight(get_format("cp"), torch.ones(8, 6, 9), MODES, (2,), sensitivity=broken)


def test_the_budget_goes_where_the_output_depends_on_it() -> None:
    """Two equal layers, one of them hardly heard at the output."""
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
            self.quiet.load_state_dict(self.loud.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loud(x) + 0.01 * self.quiet(x)

    model, images = Branches(), torch.randn(16, 8, 6, 6)
    specs = compressible_layers(model, (8, 6, 6))
    library = FitLibrary(
        model,
        specs,
        "tucker",
        moments=collect_moments(model, specs, images),
        sensitivities=collect_sensitivities(model, specs, images),
    )
    sites = library.all_candidates()
    total = sum(spec.params for spec in specs)
    loud, quiet = allocate(sites, Budget(0.6, "params", total, 0))
    assert sites[0].importance == pytest.approx(1e4 * sites[1].importance, rel=0.2)
    assert sites[0].params[loud] > sites[1].params[quiet]


def test_candidates_give_bonds_ranks_of_their_own() -> None:
    """A weight with 2 output and 6 input directions needs no third output rank."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.einsum(
        "oa,aik->oik", torch.randn(8, 2, generator=generator), torch.randn(2, 6, 9, generator=generator)
    )
    model = nn.Sequential(nn.Conv2d(6, 8, 3))
    with torch.no_grad():
        model[0].weight.copy_(weight.reshape(8, 6, 3, 3))
    (site,) = FitLibrary(model, compressible_layers(model, (6, 5, 5)), "tucker").all_candidates()
    assert all(one.ranks[0] <= 2 for each in site.candidates[:-1] for one in each.operations)
    assert np.all(np.diff(site.params) > 0)
    assert site.errors[-2] < 1e-6


@pytest.mark.parametrize("sequential", [False, True])
def test_channels_that_are_hardly_heard_give_way(small_net: nn.Module, sequential: bool) -> None:
    with torch.no_grad():
        small_net[3].weight[:, :4] *= 0.01
    images = torch.randn(64, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    plan = make_plan(small_net.eval(), (3, 10, 10), "tucker", ranks={"0": 3})
    errors = []
    with torch.no_grad():
        for weigh in (False, True):
            network = apply_plan(small_net, plan, images, sequential=sequential, weigh_outputs=weigh)
            errors.append(float((network(images) - small_net(images)).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_layers_that_stay_dense_take_part_in_the_refit(small_net: nn.Module) -> None:
    small_net.eval()
    images = torch.randn(256, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    plan = make_plan(small_net, (3, 10, 10), "tucker", ranks={"3": 2})
    with torch.no_grad():
        wanted = small_net(images)
    network = apply_plan(small_net, plan, images)
    before, after = (dict(model.named_modules()) for model in (small_net, network))
    assert torch.allclose(after["0"].weight, before["0"].weight, atol=1e-5)  # nothing is lost before it
    assert not torch.allclose(after["7"].weight, before["7"].weight, atol=1e-3)
    after["7"].load_state_dict(before["7"].state_dict())
    with torch.no_grad():
        untouched = float((network(images) - wanted).square().mean())
        refitted = float((apply_plan(small_net, plan, images)(images) - wanted).square().mean())
    assert refitted < untouched


def test_models_that_change_their_input_in_place_are_differentiated() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    assert set(collect_sensitivities(model, compressible_layers(model, (4,)), torch.randn(8, 4))) == {"1"}


def test_integer_inputs_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    specs = compressible_layers(nn.Sequential(nn.Identity(), model[1]), (5,))
    assert [spec.name for spec in specs] == ["1"]
    found = collect_sensitivities(model, specs, torch.randint(0, 7, (16,)))
    assert found["1"].shape == (3, 3)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_were_there_are_left() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model(torch.ones(1, 4)).sum().backward()
    before = model[0].weight.grad.clone()
    collect_sensitivities(model, compressible_layers(model, (4,)), torch.randn(8, 4))
    assert torch.equal(model[0].weight.grad, before)


def test_a_model_without_gradients_says_what_to_do() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(self.layer(x))
            y += 1  # the exponential's gradient needs the old values
            return y

    model = Stubborn()
    images = torch.randn(8, 4)
    with pytest.raises(DecompositionError, match=r"Stubborn.*weigh_outputs=False"):
        collect_sensitivities(model, compressible_layers(model, (4,)), images)
    plan = make_plan(model, (4,), "cp", ranks=1)
    assert apply_plan(model, plan, images, weigh_outputs=False)(images).shape == (8, 3)


class Stopped(nn.Module):
    """Two linear layers; between them gradients pass through the first channels alone."""

    def __init__(self, passing: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)
        self.register_buffer("gate", (torch.arange(7) < passing).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(torch.relu(self.before(x)))
        return self.last(y * self.gate + (y * (1 - self.gate)).detach())


@pytest.mark.parametrize("passing", [0, 2])
def test_channels_whose_gradient_is_stopped_are_measured(
    passing: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stopped(passing).eval()
    found = collect_sensitivities(model, compressible_layers(model, (5,)), torch.randn(200, 5))
    weight = model.last.weight.detach().double()
    torch.testing.assert_close(found["first"].diagonal(), (weight**2).sum(0), rtol=1e-3, atol=1e-5)
    assert set(found) == {"before", "first", "last"} if passing == 0 else {"first", "last"} <= set(found)
    (said,) = [each.getMessage() for each in caplog.records]
    assert "gradients are stopped behind" in said
    assert "first" in said


class Rounding(nn.Module):
    """A gate in steps, chosen by a layer; argmax and rounding have no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.choice, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.nn.functional.one_hot(self.choice(x).argmax(1), 8).movedim(-1, 1)
        return self.last(torch.round(4 * self.body(x)) / 4 * chosen)


def test_layers_in_front_of_a_rounding_or_a_choice_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = Rounding().eval()
    found = collect_sensitivities(model, compressible_layers(model, (3, 6, 6)), torch.randn(64, 3, 6, 6))
    assert set(found) == {"body", "choice", "last"}
    assert "gradients are stopped behind choice, body, which" in caplog.text


def test_layers_behind_a_detached_input_have_gradients_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self[0](x).detach())

    torch.manual_seed(0)
    model = Frozen(nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 3)).double()
    specs = [spec for spec in compressible_layers(model, (5,)) if spec.name != "0"]
    found = collect_sensitivities(model, specs, torch.randn(20_000, 5, dtype=torch.float64))
    jacobian = model[2].weight.detach()
    torch.testing.assert_close(found["1"], jacobian.T @ jacobian, rtol=0.1, atol=0.02)
    assert not caplog.records


def test_units_that_never_fire_are_not_taken_for_stopped_gradients(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].bias[:3] = -20.0
    found = collect_sensitivities(model, compressible_layers(model, (5,)), torch.randn(200, 5))
    assert float(found["0"].diagonal()[:3].max()) < 0.1 * float(found["0"].diagonal()[3:].mean())
    assert not caplog.records
