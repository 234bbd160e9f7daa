"""Rounding that makes up for itself, against plain rounding and against trying all integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposition.calibration.metric import RowFactor
from decomposition.fit import rounding
from decomposition.fit.rounding import compensated_weight
from decomposition.network.rounding import rounded_weight


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


def test_few_inputs_serve_as_well_as_their_moments() -> None:
    weight, _ = drawn(4, 6, 12)
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = compensated_weight(weight, RowFactor(rows, 0.1), 4)
    moments = rows.T @ rows + 0.1 * torch.eye(12, dtype=torch.float64)
    assert torch.allclose(found, compensated_weight(weight, moments, 4))
