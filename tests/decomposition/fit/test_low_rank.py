"""All ranks of a matrix come from one decomposition, each as good as the one that Eckart and Young know."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    floored,
    symmetric_root,
    triangular_root,
    whole,
)
from decomposition.fit.fitting import LARGEST_AMPLIFICATION, Fitter, LowRank, fit_weight
from decomposition.formats import get_format, list_formats
from decomposition.network.geometry import WeightModes


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def roots(matrix: torch.Tensor) -> np.ndarray:
    """The symmetric root of a positive definite matrix, by numpy alone."""
    values, vectors = np.linalg.eigh(matrix.numpy())
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(2, 14),
    columns=st.integers(2, 14),
    seen=st.integers(1, 20),
    ridge=st.floats(1e-4, 1.0),
    rows=st.booleans(),
    sensed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_rank_is_the_best_of_its_rank(
    out: int, columns: int, seen: int, ridge: float, rows: bool, sensed: bool, seed: int
) -> None:
    weight = normal(out, columns, seed=seed)
    metric: Metric = RowFactor(normal(seen, columns, seed=seed + 1), ridge)
    if not rows:
        metric = whole(metric)
    gradients = normal(out + 3, out, seed=seed + 2)
    sensitivity = gradients.T @ gradients if sensed else None
    found = LowRank(weight, metric, sensitivity)
    left = np.eye(out) if sensitivity is None else roots(floored(sensitivity))
    right = roots(whole(metric))
    values = np.linalg.svd(left @ weight.numpy() @ right, compute_uv=False)
    for rank in range(1, min(out, columns) + 1):
        best = (values[rank:] ** 2).sum() / (values**2).sum()
        assert found.squared_error(rank) == pytest.approx(best, rel=1e-6, abs=1e-14)
        output, features = found.halves(rank)
        assert (output.shape, features.shape) == ((out, rank), (rank, columns))
        rest = left @ (weight - output @ features).numpy() @ right
        assert (rest**2).sum() / (values**2).sum() == pytest.approx(best, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(("out", "columns"), [(12, 5), (5, 12)])
def test_inputs_without_energy_do_no_harm(out: int, columns: int) -> None:
    weight, patches = normal(out, columns), normal(30, columns, seed=1)
    patches[:, :3] = 0.0
    metric = patches.T @ patches
    found = LowRank(weight, metric, None)
    values = np.linalg.svd(weight.numpy() @ roots(metric), compute_uv=False)
    for rank in range(1, columns - 2):
        best = (values[rank:] ** 2).sum() / (values**2).sum()
        assert found.squared_error(rank) == pytest.approx(best, rel=1e-6, abs=1e-12)
        assert all(bool(torch.isfinite(half).all()) for half in found.halves(rank))


def test_ranks_beyond_the_smaller_side_add_zeros() -> None:
    found = LowRank(normal(3, 7), None, None)
    output, features = found.halves(5)
    assert (output.shape, features.shape) == ((3, 5), (5, 7))
    assert not output[:, 3:].any()
    assert not features[3:].any()


@settings(max_examples=25, deadline=None)
@given(out=st.integers(2, 9), columns=st.integers(2, 9), seed=st.integers(0, 500), decay=st.floats(0, 6))
def test_terms_are_those_of_the_halves(out: int, columns: int, seed: int, decay: float) -> None:
    weight = normal(out, columns, seed=seed)
    gradients = normal(out, out, seed=seed + 1) * 10.0 ** -torch.linspace(0, decay, out)
    metric = whole(RowFactor(normal(4, columns, seed=seed + 2), 1e-3))
    found = LowRank(weight, metric, gradients.T @ gradients)
    terms = found.terms(metric)
    for rank in range(1, min(out, columns) + 1):
        output, features = found.halves(rank)
        products = [torch.outer(output[:, p], features[p]) for p in range(rank)]
        plain = sum(float(each.square().sum()) for each in products) / float(weight.square().sum())
        seen = sum(float((each @ metric * each).sum()) for each in products)
        expected = max(plain, seen / float((weight @ metric * weight).sum())) ** 0.5
        assert float(terms[rank - 1]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("out", "columns"), [(8, 6), (6, 8)])
@pytest.mark.parametrize("name", list_formats())
def test_a_fitter_gives_each_rank_what_it_gets_alone(name: str, out: int, columns: int) -> None:
    tensor_format, modes = get_format(name), WeightModes((out,), (columns,), 1)
    weight = normal(out, columns, 1)
    metric = whole(RowFactor(normal(20, columns, seed=1), 0.1))
    gradients = normal(12, out, seed=2)
    fitter = Fitter(tensor_format, weight, modes, metric, gradients.T @ gradients)
    for rank in (1, 3, 2):
        ranks = tensor_format.expand(modes, rank)
        alone = fit_weight(tensor_format, weight, modes, ranks, metric, sensitivity=gradients.T @ gradients)
        fit = fitter.fit(ranks)
        assert fit.error == alone.error
        assert all(torch.equal(a, b) for a, b in zip(fit.cores, alone.cores, strict=True))
        assert [tuple(core.shape) for core in fit.cores] == tensor_format.core_shapes(modes, ranks)


def test_a_rank_whose_terms_cancel_gets_terms_that_do_not() -> None:
    out, columns = 40, 30
    modes, weight = WeightModes((out,), (columns,), 1), normal(40, 30, 1)
    sensitivity = torch.zeros(out, out, dtype=torch.float64)
    sensitivity[0, 0] = 1.0
    # All but one output hardly count, and are let grow along with inputs that hardly vary.
    metric = torch.diag(10.0 ** -torch.linspace(0, 12, columns, dtype=torch.float64))
    weight[1:, 0, 0] *= 1e4
    weight[0, 1:, 0] *= 1e4
    fitter = Fitter(get_format("cp"), weight, modes, metric, sensitivity)
    for rank in (1, 5, 20):
        fit = fitter.fit((rank,))
        sizes = fit.cores[0].square().sum(0) * fit.cores[1].square().sum(0)
        assert float(sizes.sum().sqrt() / weight.norm()) <= LARGEST_AMPLIFICATION * 1.001


def test_roots_are_roots_and_raise_what_is_small() -> None:
    gradients = normal(3, 6)
    sensitivity = gradients.T @ gradients
    raised = floored(sensitivity)
    symmetric, triangular = symmetric_root(sensitivity), triangular_root(raised)
    torch.testing.assert_close(symmetric @ symmetric, raised)
    torch.testing.assert_close(triangular.T @ triangular, raised)
    assert torch.equal(triangular, triangular.triu())
    least = torch.linalg.eigvalsh(raised)[0]
    assert float(least / sensitivity.diagonal().mean()) == pytest.approx(0.01, rel=1e-6)
    indefinite = sensitivity - 0.5 * torch.eye(6, dtype=torch.float64) * sensitivity.diagonal().mean()
    assert float(torch.linalg.eigvalsh(floored(indefinite))[0]) > 0
