"""Patches times the weight are the layer's output; channel counts split into small factors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.geometry import (
    LARGEST_FACTOR,
    Geometry,
    WeightModes,
    factorise,
    modes_from_dict,
    padded_input,
    plain_modes,
    sample_labelled_patches,
    tensorised_modes,
)
from decomposition.network.layers import LayerSpec, compressible_layers

PADDING_MODES = ["zeros", "reflect", "replicate", "circular"]
EVERY = 10**9


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Conv1d | nn.Conv2d:
    spatial = draw(st.integers(1, 2))
    pairs = [st.integers(1, 4)] * spatial
    kernel, dilation = draw(st.tuples(*pairs)), draw(st.tuples(*[st.integers(1, 2)] * spatial))
    stride = draw(st.tuples(*[st.integers(1, 3)] * spatial))
    padding: str | tuple[int, ...] = draw(st.sampled_from(["same", "valid", "numbers"]))
    if padding == "numbers":
        padding = draw(st.tuples(*[st.integers(0, 3)] * spatial))
    torch.manual_seed(0)
    return (nn.Conv1d, nn.Conv2d)[spatial - 1](
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        kernel,  # type: ignore[arg-type]
        stride=1 if padding == "same" else stride,  # type: ignore[arg-type]
        padding=padding,  # type: ignore[arg-type]
        dilation=dilation,  # type: ignore[arg-type]
        padding_mode=draw(st.sampled_from(PADDING_MODES)),
        dtype=torch.float64,
    )


@given(module=convolutions(), batch=st.integers(1, 3), channels_last=st.booleans())
def test_patches_times_weight_are_the_convolution(
    module: nn.Conv1d | nn.Conv2d, batch: int, channels_last: bool
) -> None:
    spatial = len(module.kernel_size)
    x = torch.randn(batch, module.in_channels, *(8, 9)[:spatial], dtype=torch.float64, generator=generator())
    if channels_last and spatial == 2:
        x = x.to(memory_format=torch.channels_last)
    (patches,), _ = sample_labelled_patches(module, [x], EVERY, generator())
    assert module.bias is not None
    expected = module(x).movedim(1, -1).reshape(-1, module.out_channels)
    torch.testing.assert_close(patches @ module.weight.flatten(1).T + module.bias, expected)


@given(positions=st.lists(st.integers(1, 4), max_size=2))
def test_a_linear_layers_patches_are_its_input_vectors(positions: list[int]) -> None:
    module = nn.Linear(5, 3)
    x = torch.randn(2, *positions, 5, generator=generator())
    (patches,), _ = sample_labelled_patches(module, [x], EVERY, generator())
    torch.testing.assert_close(patches, x.reshape(-1, 5))


def test_drawn_patches_belong_together() -> None:
    module = nn.Conv2d(3, 4, 3, padding=1, stride=2)
    x = torch.randn(4, 3, 9, 9, generator=generator())
    (first, second), _ = sample_labelled_patches(module, [x, 2 * x], 50, generator())
    assert first.shape == (50, 27)
    torch.testing.assert_close(second, 2 * first)


def test_drawn_patches_are_patches_of_the_input() -> None:
    module = nn.Conv2d(2, 4, 3)
    x = torch.randn(2, 2, 6, 6, generator=generator())
    (every,), _ = sample_labelled_patches(module, [x], EVERY, generator())
    (drawn,), _ = sample_labelled_patches(module, [x], 7, generator())
    known = {tuple(patch.tolist()) for patch in every}
    assert all(tuple(patch.tolist()) in known for patch in drawn)


def test_the_same_generator_draws_the_same_patches() -> None:
    module = nn.Linear(3, 3)
    x = torch.randn(100, 3, generator=generator())
    assert torch.equal(*[sample_labelled_patches(module, [x], 10, generator())[0][0] for _ in range(2)])


def test_an_unpadded_input_is_not_copied() -> None:
    x = torch.randn(1, 2, 5, 5)
    assert padded_input(nn.Conv2d(2, 2, 3, padding="valid"), x) is x
    assert padded_input(nn.Conv2d(2, 2, 1, padding="same"), x) is x


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@given(
    kernel=PAIRS,
    dilation=PAIRS,
    stride=PAIRS,
    padding=st.one_of(st.sampled_from(["same", "valid"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    seed=st.integers(0, 100),
)
def test_a_separable_kernel_slides_along_one_axis_after_the_other(
    mode: str,
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    seed: int,
) -> None:
    dense = nn.Conv2d(
        1,
        1,
        kernel,
        stride=(1, 1) if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        padding_mode=mode,  # type: ignore[arg-type]
        bias=False,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(seed)
    columns, rows = (torch.randn(k, generator=generator, dtype=torch.float64) for k in kernel)
    with torch.no_grad():
        dense.weight.copy_(torch.outer(columns, rows))
    x = torch.randn(2, 1, 7, 8, generator=generator, dtype=torch.float64)
    geometry = Geometry.of(dense)
    first, second = geometry.along(0), geometry.along(1)
    assert (first.kernel_size, second.kernel_size) == ((kernel[0], 1), (1, kernel[1]))
    between = first.apply(x, columns.reshape(1, 1, -1), None)
    torch.testing.assert_close(second.apply(between, rows.reshape(1, 1, -1), None), dense(x))


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
