"""The products of a minimiser's step, against the squared error written out and differentiated by torch."""

import pytest
import torch

from decomposition.calibration.metric import Metric, RowFactor, whole
from decomposition.fit.least_squares import Quadratic

COLUMNS = 12


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metrics() -> dict[str, Metric | None]:
    rows = normal(5, COLUMNS, seed=1)
    return {
        "none": None,
        "whole": rows.T @ rows,
        "rows": RowFactor(rows),
        "rows and a ridge": RowFactor(rows, 0.3),
    }


@pytest.mark.parametrize("features", [3, 20])
@pytest.mark.parametrize("name", metrics())
def test_the_products_are_those_of_the_squared_error(name: str, features: int) -> None:
    metric = metrics()[name]
    matrix = torch.eye(COLUMNS, dtype=torch.float64) if metric is None else whole(metric)
    weight, output = normal(7, COLUMNS, seed=2), normal(7, features, seed=3)
    inner = normal(features, COLUMNS, seed=4).requires_grad_()
    rest = output @ inner - weight
    (gradient,) = torch.autograd.grad(((rest @ matrix) * rest).sum() / 2, inner)

    products = Quadratic(weight, metric).products(inner.detach())
    assert torch.allclose(products.gram, inner.detach() @ matrix @ inner.detach().T)
    assert torch.allclose(products.cross, weight @ matrix @ inner.detach().T)
    assert torch.allclose(products.slope(output), gradient)


@pytest.mark.parametrize("name", metrics())
def test_float32_rounds_them(name: str) -> None:
    weight, inner, output = normal(7, COLUMNS, seed=2), normal(4, COLUMNS, seed=4), normal(7, 4, seed=3)
    quadratic = Quadratic(weight, metrics()[name])
    exact, rounded = quadratic.products(inner), quadratic.in_float32.products(inner.float())
    for one, other in (
        (rounded.gram, exact.gram),
        (rounded.cross, exact.cross),
        (rounded.slope(output.float()), exact.slope(output)),
    ):
        assert one.dtype == torch.float32
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
