"""Selecting input channels, against numpy's least squares and against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from decomposition import inspect_layers
from decomposition.calibration.metric import RowFactor, floored, select_inputs

CHANNELS, KERNEL, OUTPUTS = 5, 2, 4


def correlated_patches(seed: int, count: int = 400) -> torch.Tensor:
    """Patches (count, in * kernel) whose channels explain one another in part."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    mixing = torch.randn(4, CHANNELS * KERNEL, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, CHANNELS * KERNEL, generator=generator, dtype=torch.float64)
    return hidden @ mixing + 0.5 * noise


def lost(
    weight: torch.Tensor, patches: torch.Tensor, sensitivity: torch.Tensor, change: torch.Tensor
) -> float:
    """Relative output error, from the outputs themselves."""

    raised = floored(sensitivity)  # as for every fit: no direction counts for nothing

    def size(matrix: torch.Tensor) -> float:
        outputs = patches @ matrix.T
        return float(((outputs @ raised) * outputs).sum())

    return (size(change) / size(weight)) ** 0.5


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(OUTPUTS, CHANNELS, KERNEL, generator=generator, dtype=torch.float64)
    root = torch.randn(OUTPUTS, OUTPUTS, generator=generator, dtype=torch.float64)
    return weight, correlated_patches(seed), root @ root.T


def columns(reads: tuple[int, ...]) -> list[int]:
    return [channel * KERNEL + position for channel in reads for position in range(KERNEL)]


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_the_weight_is_the_least_squares_solution_on_what_is_read(seed: int) -> None:
    weight, patches, sensitivity = problem(seed)
    matrix = weight.flatten(1)
    found = select_inputs(weight, patches.T @ patches / len(patches), sensitivity, range(1, CHANNELS))
    for count, selection in found.items():
        assert len(selection.reads) == count
        index = columns(selection.reads)
        expected, *_ = np.linalg.lstsq(patches[:, index].numpy(), (patches @ matrix.T).numpy(), rcond=None)
        best = torch.zeros_like(matrix)
        best[:, index] = torch.from_numpy(expected.T)
        assert not bool(selection.weight[:, [c for c in range(CHANNELS) if c not in selection.reads]].any())
        own = lost(matrix, patches, sensitivity, matrix - selection.weight.flatten(1))
        assert selection.error == pytest.approx(own, rel=1e-6)
        # The ridge keeps it a little away from the best.
        assert own <= 1.02 * lost(matrix, patches, sensitivity, matrix - best) + 1e-3


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_of_all_single_channels_the_one_that_costs_least_goes(seed: int) -> None:
    weight, patches, sensitivity = problem(seed)
    metric = patches.T @ patches / len(patches)
    chosen = select_inputs(weight, metric, sensitivity, [CHANNELS - 1])[CHANNELS - 1]
    errors = []
    for reads in itertools.combinations(range(CHANNELS), CHANNELS - 1):
        index = columns(reads)
        solved = torch.linalg.lstsq(patches[:, index], patches @ weight.flatten(1).T).solution
        best = torch.zeros_like(weight.flatten(1))
        best[:, index] = solved.T
        errors.append(lost(weight.flatten(1), patches, sensitivity, weight.flatten(1) - best))
    assert chosen.error == pytest.approx(min(errors), rel=0.02, abs=1e-3)


def test_smaller_selections_are_part_of_larger_ones() -> None:
    weight, patches, sensitivity = problem(3)
    found = select_inputs(weight, RowFactor(patches / len(patches) ** 0.5), sensitivity, range(1, CHANNELS))
    for count in range(2, CHANNELS):
        assert set(found[count - 1].reads) < set(found[count].reads)
        assert found[count - 1].error >= found[count].error


def test_without_moments_the_other_columns_stay_as_they_are() -> None:
    weight, *_ = problem(5)
    selection = select_inputs(weight, None, None, [2])[2]
    strongest = weight.square().sum((0, 2)).topk(2).indices.sort().values.tolist()
    assert list(selection.reads) == strongest
    assert torch.allclose(selection.weight[:, strongest], weight[:, strongest])


def test_a_narrowed_layer_is_described_as_torch_builds_it() -> None:
    for bias in (False, True):
        wide, narrow = (
            inspect_layers(nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=bias)), (i, 9, 9))[0]
            for i, o in ((8, 12), (6, 4))
        )
        assert wide.narrowed(inputs=6, outputs=4) == narrow
    assert wide.narrowed() == wide
