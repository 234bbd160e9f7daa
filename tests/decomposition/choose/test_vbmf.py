"""Analytic variational Bayes finds the rank and the noise of synthetic matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decomposition.choose.heuristics import matrix_rank
from decomposition.errors import DecompositionError


def low_rank(rows: int, columns: int, rank: int, noise: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right, rest = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, rank), (rank, columns), (rows, columns))
    )
    return left @ right + noise * rest


@given(
    sides=st.tuples(st.integers(30, 70), st.integers(30, 120)),
    rank=st.integers(1, 8),
    noise=st.floats(0.01, 0.3),
    seed=st.integers(0, 1000),
)
def test_rank_and_noise_are_recovered_in_both_orientations(
    sides: tuple[int, int], rank: int, noise: float, seed: int
) -> None:
    matrix = low_rank(*sides, rank, noise, seed)
    found, turned = matrix_rank(matrix), matrix_rank(matrix.T)
    assert found.rank == turned.rank == rank
    assert found.noise_variance == pytest.approx(noise**2, rel=0.2)
    assert turned.noise_variance == pytest.approx(found.noise_variance, rel=1e-4)


@given(scale=st.floats(1e-6, 1e6))
def test_the_unit_of_the_matrix_does_not_matter(scale: float) -> None:
    matrix = low_rank(40, 60, 5, 0.2)
    found, scaled = matrix_rank(matrix), matrix_rank(scale * matrix)
    assert scaled.rank == found.rank
    assert scaled.noise_variance == pytest.approx(scale**2 * found.noise_variance, rel=1e-4)


def test_pure_noise_has_rank_zero() -> None:
    found = matrix_rank(low_rank(64, 576, 0, 0.5))
    assert found.rank == 0
    assert found.noise_variance == pytest.approx(0.25, rel=0.02)


def test_without_noise_the_algebraic_rank_is_found() -> None:
    found = matrix_rank(low_rank(50, 80, 3, 0.0))
    assert found.rank == 3
    assert found.noise_variance < 1e-20


@pytest.mark.parametrize("shape", [(1, 1), (1, 20), (20, 1), (2, 2)])
def test_matrices_too_small_to_tell_signal_from_noise(shape: tuple[int, int]) -> None:
    found = matrix_rank(torch.ones(shape) + torch.eye(*shape))
    assert 0 <= found.rank <= min(shape)
    assert found.noise_variance > 0


def test_zeros_have_no_rank_and_no_noise() -> None:
    found = matrix_rank(torch.zeros(3, 5))
    assert (found.rank, found.noise_variance) == (0, 0.0)


@pytest.mark.parametrize("matrix", [torch.zeros(3), torch.zeros(0, 4), torch.zeros(2, 2, 2)])
def test_what_is_no_matrix_is_refused(matrix: torch.Tensor) -> None:
    with pytest.raises(DecompositionError, match="needs a matrix"):
        matrix_rank(matrix)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(bad: float) -> None:
    with pytest.raises(DecompositionError, match="NaN or infinite"):
        matrix_rank(torch.tensor([[1.0, bad]]))
