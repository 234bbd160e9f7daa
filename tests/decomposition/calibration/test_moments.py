"""Moments of layer inputs, and the metric that they make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf
from torch import nn

from decomposition import (
    apply_plan,
    collect_moments,
    collect_sensitivities,
    compressible_layers,
    fit_weight,
    get_format,
    make_plan,
)
from decomposition.calibration.metric import (
    RowFactor,
    Spread,
    channel_moments,
    cholesky,
    covariance,
    gram,
    is_finite,
    labels_or_single,
    mean_of,
    scaled,
    shrinkage,
    shrunk,
    squared_norm,
    times,
    trace,
    with_mean,
)
from decomposition.calibration.moments import InputMoments
from decomposition.errors import DecompositionError
from decomposition.fit import refit
from decomposition.network.geometry import WeightModes

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


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_rows_and_matrix_are_the_same_metric(ridge: float) -> None:
    rows, left = normal(5, 18), normal(3, 18, seed=1)
    eye = torch.eye(18, dtype=torch.float64)
    factor, matrix = RowFactor(rows, ridge), rows.T @ rows + ridge * eye
    torch.testing.assert_close(times(left, factor), times(left, matrix))
    torch.testing.assert_close(times(left, scaled(factor, 3.0)), times(left, scaled(matrix, 3.0)))
    torch.testing.assert_close(times(left, shrunk(factor, 0.3)), times(left, shrunk(matrix, 0.3)))
    torch.testing.assert_close(
        times(left, with_mean(factor, left[0])), times(left, with_mean(matrix, left[0]))
    )
    torch.testing.assert_close(channel_moments(factor, 2, 9), channel_moments(matrix, 2, 9))
    assert trace(factor) == pytest.approx(trace(matrix))
    assert squared_norm(factor) == pytest.approx(squared_norm(matrix))
    assert trace(shrunk(factor, 0.3)) == pytest.approx(trace(factor))
    assert is_finite(factor)
    assert not is_finite(RowFactor(rows / 0, ridge))
    assert not is_finite(RowFactor(rows, float("nan")))


@pytest.mark.parametrize("name", ["tucker", "tensor_ring"])
def test_fits_do_not_depend_on_how_the_metric_is_held(name: str) -> None:
    tensor_format, modes = get_format(name), WeightModes((6,), (5,), 9)
    weight, rows = normal(6, 5, 9), normal(20, 45, seed=1)
    ranks = tensor_format.expand(modes, 2)
    errors = [
        fit_weight(tensor_format, weight, modes, ranks, m).error for m in (RowFactor(rows), rows.T @ rows)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_moments_of_few_inputs_are_kept_as_rows() -> None:
    model = nn.Sequential(nn.Linear(50, 4))
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) + 1
    specs = compressible_layers(model, (50,))
    few = collect_moments(model, specs, x.split(8))["0"]
    many = collect_moments(model, specs, x.repeat(2, 1).split(8))["0"]
    assert isinstance(few.covariance, RowFactor)
    assert isinstance(many.covariance, torch.Tensor)
    eye = torch.eye(50, dtype=torch.float64)
    torch.testing.assert_close(times(eye, few.covariance), many.covariance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(times(eye, few.second_moment), many.second_moment, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 601])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_products_of_rows_with_themselves_are_those_of_one_product(count: int, columns: int) -> None:
    rows = normal(count, columns)
    torch.testing.assert_close(gram(rows), rows.T @ rows)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("inputs", [30, 6])
def test_both_ways_to_solve_a_refit_agree(
    inputs: int, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, y = normal(4, 12), normal(30, 12, seed=1) + 1, normal(30, 12, seed=2) - 1
    given, labels = (weight, x, y, x.mean(0), y.mean(0)), torch.arange(30) % inputs
    ways = []
    for few in (True, False):
        monkeypatch.setattr(refit, "worth_factoring", lambda *_, few=few: few)
        ways.append(refit._regression(*given, labels, centred=centred))
    few, many = ways
    torch.testing.assert_close(few[0], many[0])
    eye = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(times(eye, few[1]), times(eye, many[1]))


@pytest.mark.parametrize("sequential", [False, True])
def test_a_layer_with_a_great_many_inputs_fits_into_memory(sequential: bool) -> None:
    """Its second-moment matrix would take 12.8 GB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40_000, 12), nn.ReLU(), nn.Linear(12, 5)).eval()
    x = torch.randn(24, 40_000)
    plan = make_plan(model, (40_000,), "tucker", ranks={"0": 4})
    small = apply_plan(model, plan, x, sequential=sequential)
    assert small[0].error < 0.9
    assert small(x).shape == (24, 5)


def test_covariances_are_summed_about_their_means_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decomposition.calibration.metric._COPIED", 100)
    rows = normal(70, 5).float() + 3000 * torch.linspace(-1, 1, 5)
    others = rows[:, :2] - normal(70, 2, seed=1).float()
    means = mean_of(rows), mean_of(others)
    both = np.cov(np.concatenate([rows, others], 1).astype(np.float64).T, bias=True)
    np.testing.assert_allclose(covariance(rows, means[0]), both[:5, :5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        covariance(rows, means[0], others, means[1]), both[:5, 5:], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("lacking", [0.0, 1e-10, 1e-5])
def test_what_rounding_took_from_moments_is_added_with_a_word(
    lacking: float, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = torch.linalg.qr(normal(4, 4)).Q
    matrices = torch.stack(
        [normal(4, 4) @ normal(4, 4).T, (vectors * torch.tensor([3, 2, 1, -lacking])) @ vectors.T]
    )
    if not lacking:
        matrices[1] += torch.eye(4)
    root = cholesky(matrices)
    torch.testing.assert_close(root @ root.mT, matrices, rtol=1e-3, atol=1e-3)
    assert ("not positive" in caplog.text) == bool(lacking)


def test_moments_that_nothing_makes_positive_are_refused() -> None:
    for matrix in (-torch.eye(3), torch.full((3, 3), torch.nan)):
        with pytest.raises(DecompositionError, match="second moments of 3 features are not positive"):
            cholesky(matrix)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of more than 20 inputs count as very wide ones."""
    for module in ("calibration.metric", "calibration.moments"):
        monkeypatch.setattr(f"decomposition.{module}.WIDEST", 20)


def test_moments_of_a_wide_layer_are_rows_of_a_bounded_size(narrow: None) -> None:
    model, x = nn.Sequential(nn.Conv1d(8, 4, 5)), normal(40, 8, 30).float()
    specs = compressible_layers(model, (8, 30))
    found = collect_moments(model, specs, x.split(8))["0"].covariance
    assert isinstance(found, RowFactor)
    assert found.rows.shape == (20**2 // 40, 40)


@pytest.mark.parametrize("name", ["tucker", "cp", "tensor_ring", "spatial_svd"])
@pytest.mark.parametrize("sequential", [False, True])
def test_a_wide_layer_is_compressed_nearly_as_by_its_whole_moments(
    name: str, sequential: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs lie in few directions, of which a dozen patches know nearly as much."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 8), nn.Flatten(), nn.Linear(6, 3)).eval()
    mixing, x = normal(3, 32), normal(400, 3, seed=1)
    x = (x @ mixing).reshape(400, 4, 8).float()
    plan = make_plan(model, (4, 8), name, ranks={"0": 2})
    errors = []
    for widest, inputs in ((8192, x), (20, x), (8192, None)):
        for module in ("calibration.metric", "calibration.moments"):
            monkeypatch.setattr(f"decomposition.{module}.WIDEST", widest)
        with torch.no_grad():
            small = apply_plan(model, plan, inputs, sequential=sequential)
            errors.append(float((small(x) - model(x)).norm() / model(x).norm()))
    whole, sampled, by_weight = errors
    assert sampled <= 1.5 * whole + 0.05
    assert sampled < 0.5 * by_weight


def test_no_sensitivity_matrix_is_larger_than_the_largest(narrow: None) -> None:
    model = nn.Sequential(nn.Linear(6, 21), nn.ReLU(), nn.Linear(21, 20))
    specs = compressible_layers(model, (6,))
    assert set(collect_sensitivities(model, specs, normal(30, 6).float())) == {"2"}


@given(count=st.integers(2, 40), columns=st.integers(2, 30), seed=st.integers(0, 1000))
def test_one_patch_an_input_gives_the_estimate_of_scikit_learn(count: int, columns: int, seed: int) -> None:
    rows = normal(count, columns, seed=seed) @ normal(columns, columns, seed=seed + 1)
    rows = rows - rows.mean(0)
    expected, share = ledoit_wolf(rows.numpy(), assume_centered=True)
    for metric in (RowFactor(rows / count**0.5), rows.T @ rows / count):
        found = shrinkage(rows, torch.arange(count), metric)
        assert found == pytest.approx(share, abs=1e-9)
        estimate = times(torch.eye(columns, dtype=torch.float64), shrunk(metric, found))
        torch.testing.assert_close(estimate, torch.from_numpy(expected))


def test_repeated_patches_of_an_input_add_no_knowledge() -> None:
    rows = normal(12, 20)
    rows = rows - rows.mean(0)
    metric = rows.T @ rows / len(rows)
    single = shrinkage(rows, torch.arange(12), metric)
    repeated, labels = rows.repeat_interleave(9, 0), torch.arange(12).repeat_interleave(9)
    assert shrinkage(repeated, labels, metric) == pytest.approx(single)
    assert shrinkage(repeated, torch.arange(108), metric) < single / 5


def test_inputs_may_have_patches_of_any_number_and_order() -> None:
    rows = normal(50, 6) * torch.tensor([9.0, 3.0, 1.0, 1.0, 0.3, 0.1], dtype=torch.float64)
    labels = torch.tensor([0, 3, 3, 7, 1] * 10)
    spread, order = Spread(), torch.randperm(50, generator=torch.Generator().manual_seed(0))
    spread.add(rows[order], labels[order])
    metric = rows.T @ rows / 50
    shares = [rows[labels == label] for label in labels.unique()]
    squares = sum(float((r.T @ r).square().sum()) for r in shares) / 50**2
    weights = sum(len(r) ** 2 for r in shares) / 50**2
    size, flat = float(metric.square().sum()), float(metric.trace()) ** 2 / 6
    assert spread.shrinkage(metric) == pytest.approx((squares - weights * size) / (size - flat))


def test_much_data_is_believed_and_the_identity_needs_no_help() -> None:
    rows = normal(20_000, 5) * torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    assert 0 < shrinkage(rows, torch.arange(20_000), rows.T @ rows / 20_000) < 1e-3
    eye = torch.eye(5, dtype=torch.float64)
    assert shrinkage(5**0.5 * eye, torch.arange(5), eye) == 0


def test_the_patches_of_a_single_input_stand_for_themselves() -> None:
    assert torch.equal(labels_or_single(torch.zeros(4, dtype=torch.long), 1), torch.arange(4))
    assert torch.equal(labels_or_single(torch.tensor([0, 0, 1]), 2), torch.tensor([0, 0, 1]))


def test_moments_and_sensitivities_of_few_images_are_shrunk_and_those_of_many_hardly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten()).eval()
    specs = compressible_layers(model, (3, 8, 8))
    images = torch.randn(600, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cumsum(2)
    few, many = (collect_moments(model, specs, images[:count].split(5)) for count in (10, 600))
    for name in few:
        assert many[name].shrinkage < few[name].shrinkage / 10
        found = torch.as_tensor(many[name].metric(centred=True))
        sampled = torch.as_tensor(many[name].covariance)
        torch.testing.assert_close(found.trace(), sampled.trace())
    thin, thick = (collect_sensitivities(model, specs, images[:count])["0"] for count in (2, 600))
    assert torch.linalg.cond(thin) < 1e3
    assert thick.shape == thin.shape


@pytest.mark.parametrize(
    ("name", "sequential", "count"),
    [
        *(("cp", True, 2), ("tensor_ring", False, 4), ("tucker", True, 4), ("tensor_train", False, 4)),
        pytest.param("cp", False, 4, marks=pytest.mark.slow),
        pytest.param("tensor_ring", True, 4, marks=pytest.mark.slow),
        pytest.param("tucker", False, 4, marks=pytest.mark.slow),
        pytest.param("tensor_train", True, 4, marks=pytest.mark.slow),
    ],
)
def test_few_images_do_not_ruin_the_network_for_others(name: str, sequential: bool, count: int) -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in range(2)]
    norms = [nn.BatchNorm2d(12, momentum=None) for _ in range(3)]
    model = nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1, bias=False), norms[0], nn.ReLU()),
        *(convolutions[0], norms[1], nn.ReLU(), convolutions[1], norms[2], nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
    )
    images = nn.functional.interpolate(normal(200, 3, 3, 3).float(), size=6, mode="bilinear")
    model(images)
    model.eval()
    ranks = {"cp": 30, "tensor_ring": 4, "tucker": 7, "tensor_train": 7}[name]
    plan = make_plan(model, (3, 6, 6), name, {"3": ranks, "6": ranks})
    small = apply_plan(model, plan, images[:count], sequential=sequential)
    with torch.no_grad():
        expected, found = model(images[count:]), small(images[count:])
    assert (found - expected).norm() < (expected - expected.mean(0)).norm()
