"""What few inputs do not determine is shrunk by the formula of Ledoit and Wolf."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf
from torch import nn

from decomposition import apply_plan, collect_moments, collect_sensitivities, compressible_layers, make_plan
from decomposition.calibration.metric import RowFactor, Spread, labels_or_single, shrinkage, shrunk, times


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
