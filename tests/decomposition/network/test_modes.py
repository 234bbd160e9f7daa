"""Channel counts split into small factors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.layers import LayerSpec, compressible_layers
from decomposition.network.modes import (
    LARGEST_FACTOR,
    WeightModes,
    factorise,
    modes_from_dict,
    plain_modes,
    tensorised_modes,
)


def largest_prime(number: int) -> int:
    return max(
        (d for d in range(2, number + 1) if number % d == 0 and all(d % p for p in range(2, d))), default=1
    )


@given(channels=st.integers(1, 4096))
def test_factors_multiply_to_the_channels_and_stay_small(channels: int) -> None:
    factors = factorise(channels)
    assert math.prod(factors) == channels
    assert list(factors) == sorted(factors, reverse=True)
    assert max(factors) <= max(LARGEST_FACTOR, largest_prime(channels))
    assert 1 not in factors[1:]


@pytest.mark.parametrize(
    ("channels", "factors"),
    [(1, (1,)), (3, (3,)), (13, (13,)), (16, (4, 4)), (64, (4, 4, 4)), (256, (4, 4, 4, 4)), (10, (5, 2))],
)
def test_known_factorisations(channels: int, factors: tuple[int, ...]) -> None:
    assert factorise(channels) == factors


@pytest.fixture
def spec() -> LayerSpec:
    return compressible_layers(nn.Sequential(nn.Conv2d(12, 16, (1, 3))), (12, 5, 5))[0]


def test_plain_and_tensorised_modes_hold_the_same_weight(spec: LayerSpec) -> None:
    plain, split = plain_modes(spec), tensorised_modes(spec)
    assert plain.plain
    assert not split.plain
    assert plain.sizes == (16, 12, 3)
    assert math.prod(split.sizes) == plain.elements == split.elements == 16 * 12 * 3
    assert (split.out_channels, split.in_channels, split.columns) == (16, 12, 36)


def test_modes_survive_their_description(spec: LayerSpec) -> None:
    assert modes_from_dict(spec, None) == plain_modes(spec)
    split = tensorised_modes(spec)
    assert modes_from_dict(spec, split.to_dict()) == split


def test_factors_of_another_layer_are_refused(spec: LayerSpec) -> None:
    with pytest.raises(DecompositionError, match=r"layer '0'.*out 16, in 12"):
        modes_from_dict(spec, {"out": [4, 4], "in": [4, 4]})


def test_modes_tell_the_kernel_along_each_axis(spec: LayerSpec) -> None:
    assert plain_modes(spec).kernel_size == tensorised_modes(spec).kernel_size == (1, 3)
    assert WeightModes((2,), (3,), 9).kernel_size == (9,)
    assert WeightModes((2,), (3,), 1).kernel_size == ()
    linear = compressible_layers(nn.Sequential(nn.Linear(4, 3)), (4,))[0]
    assert plain_modes(linear) == WeightModes((3,), (4,), 1)


def test_modes_of_another_kernel_are_others() -> None:
    assert WeightModes((2,), (3,), 6, (2, 3)) != WeightModes((2,), (3,), 6, (3, 2))
    with pytest.raises(DecompositionError, match=r"\(3, 3\) has 9 positions, not 6"):
        WeightModes((2,), (3,), 6, (3, 3))
