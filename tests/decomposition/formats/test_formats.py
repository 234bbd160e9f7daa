"""Every registered format: ranks, reconstruction and cost, against oracles of their own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorly as tl
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from two_matrices import TwoMatrices

from decomposition import TensorFormat, fit_weight
from decomposition.errors import DecompositionError
from decomposition.formats import Cores, Ranks, get_format, list_formats, register_format
from decomposition.network.cost import count_macs
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import LayerSpec, compressible_layers
from decomposition.testing import (
    MODES,
    FormatContract,
    modes_name,
    normal,
    random_cores,
    relative_error,
    unequal_ranks,
)


@dataclass(frozen=True)
class Oracle:
    """A format written down independently of the package.

    Attributes:
        weight: Contracts the cores to the weight (out, in, kernel).
        stages: Builds the way of executing a Conv2d at some ranks out of plain torch layers.
        start_is_exact: Whether the algebraic start is the weight itself at the largest ranks.
    """

    weight: Callable[[Cores, WeightModes], torch.Tensor]
    stages: Callable[[str, LayerSpec, Ranks], nn.Module]
    start_is_exact: bool


def by_tensorly(
    contract: Callable[[list[np.ndarray], WeightModes], np.ndarray],
) -> Callable[[Cores, WeightModes], torch.Tensor]:
    """Make an oracle of the weight from tensorly's own routine."""

    def weight(cores: Cores, modes: WeightModes) -> torch.Tensor:
        with tl.backend_context("numpy"):
            full = contract([core.numpy() for core in cores], modes)
        return torch.from_numpy(full).reshape(modes.out_channels, modes.in_channels, modes.kernel)

    return weight


def tucker_weight(arrays: list[np.ndarray], modes: WeightModes) -> np.ndarray:
    if modes.kernel == 1:
        return tl.tucker_to_tensor((np.eye(arrays[0].shape[1]), arrays))
    output, core, inner = arrays
    return tl.tucker_to_tensor((core, [output, inner, np.eye(modes.kernel)]))


def three_stages(spec: LayerSpec, entering: int, leaving: int, groups: int) -> nn.Module:
    """Mix channels, apply the kernel in groups, mix channels."""
    return nn.Sequential(
        nn.Conv2d(spec.in_channels, entering, 1, bias=False),
        nn.Conv2d(entering, leaving, spec.kernel_size, spec.stride, groups=groups, bias=False),
        nn.Conv2d(leaving, spec.out_channels, 1, bias=False),
    )


def tucker_stages(way: str, spec: LayerSpec, ranks: Ranks) -> nn.Module:
    return {"chain": three_stages(spec, ranks[1], ranks[0], 1)}[way]


def cp_stages(way: str, spec: LayerSpec, ranks: Ranks) -> nn.Module:
    return {"chain": three_stages(spec, ranks[0], ranks[0], ranks[0])}[way]


def chain_stages(way: str, spec: LayerSpec, bonds: Ranks) -> nn.Module:
    a, b, c = bonds[:3]
    kernel, stride, out, inp = spec.kernel_size, spec.stride, spec.out_channels, spec.in_channels
    half = nn.Sequential(
        nn.Conv2d(inp, a * b, kernel, stride, bias=False), nn.Conv2d(a * b, out, 1, bias=False)
    )
    return {
        "chain": three_stages(spec, b * c, b * a, b),
        "half": half,
        "dense": nn.Conv2d(inp, out, kernel, stride, bias=False),
    }[way]


def spatial_weight(cores: Cores, modes: WeightModes) -> torch.Tensor:
    """Compose the two convolutions as torch does: what they make of an impulse is the weight."""
    height, width = {0: (1, 1), 1: (modes.kernel, 1)}.get(len(modes.kernel_size), modes.kernel_size[:2])
    impulses = torch.eye(modes.in_channels, dtype=torch.float64)[:, :, None, None]
    impulses = F.pad(impulses, (width - 1, width - 1, height - 1, height - 1))
    between = F.conv2d(impulses, cores[1].reshape(*cores[1].shape[:2], height, 1))
    response = F.conv2d(between, cores[0].reshape(*cores[0].shape[:2], 1, width))
    # Convolution layers correlate: the response to an impulse is the mirrored kernel.
    return response.flip(2, 3).transpose(0, 1).reshape(modes.out_channels, modes.in_channels, modes.kernel)


def spatial_stages(way: str, spec: LayerSpec, ranks: Ranks) -> nn.Module:
    (height, width), (down, right) = spec.kernel_size, spec.stride
    first, second = ((down, 1), (1, right)) if width > 1 else ((down, right), (1, 1))
    chain = nn.Sequential(
        nn.Conv2d(spec.in_channels, ranks[0], (height, 1), first, bias=False),
        nn.Conv2d(ranks[0], spec.out_channels, (1, width), second, bias=False),
    )
    return {"chain": chain}[way]


def pivoted_stages(way: str, spec: LayerSpec, ranks: Ranks) -> nn.Module:
    features = nn.Conv2d(spec.in_channels, ranks[0], spec.kernel_size, spec.stride, bias=False)
    return {"chain": nn.Sequential(features, nn.Conv2d(ranks[0], spec.out_channels, 1, bias=False))}[way]


def matrix_weight(cores: Cores, modes: WeightModes) -> torch.Tensor:
    return torch.matmul(*cores).reshape(modes.out_channels, modes.in_channels, modes.kernel)


ORACLES = {
    "tensor_ring": Oracle(
        by_tensorly(lambda arrays, modes: tl.tr_to_tensor(arrays)),
        lambda way, spec, ranks: chain_stages(way, spec, (*ranks, ranks[0])),
        start_is_exact=False,
    ),
    "tensor_train": Oracle(
        by_tensorly(lambda arrays, modes: tl.tt_to_tensor(arrays)),
        lambda way, spec, ranks: chain_stages(way, spec, (1, *ranks, 1)),
        start_is_exact=True,
    ),
    "cp": Oracle(
        by_tensorly(lambda arrays, modes: tl.cp_to_tensor((None, arrays))), cp_stages, start_is_exact=False
    ),
    "tucker": Oracle(by_tensorly(tucker_weight), tucker_stages, start_is_exact=True),
    "pifa": Oracle(matrix_weight, pivoted_stages, start_is_exact=True),
    "spatial_svd": Oracle(spatial_weight, spatial_stages, start_is_exact=True),
}


CASES = [
    pytest.param(name, modes, id=f"{name}-{modes_name(modes)}")
    for name in ORACLES
    for modes in MODES
    if modes.plain or get_format(name).tensorisable
]


class TestFormats(FormatContract):
    names = list_formats()


@pytest.mark.parametrize(("name", "modes"), CASES)
def test_reconstruction_agrees_with_the_oracle(name: str, modes: WeightModes) -> None:
    tensor_format = get_format(name)
    cores = random_cores(tensor_format, modes, unequal_ranks(tensor_format, modes))
    found, expected = tensor_format.reconstruct(cores, modes), ORACLES[name].weight(cores, modes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_long_kernel_is_contracted_alike() -> None:
    modes, tucker = WeightModes((5,), (4,), 40), get_format("tucker")
    cores = random_cores(tucker, modes, (3, 2))
    torch.testing.assert_close(tucker.reconstruct(cores, modes), ORACLES["tucker"].weight(cores, modes))


@pytest.mark.parametrize(
    ("name", "modes"),
    [case for case in CASES if ORACLES[case.values[0]].start_is_exact or case.values[1].sizes[2:] == ()],
)
def test_the_algebraic_start_is_exact_at_the_largest_ranks(name: str, modes: WeightModes) -> None:
    tensor_format = get_format(name)
    weight = torch.randn(
        modes.out_channels,
        modes.in_channels,
        modes.kernel,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    cores = tensor_format.start(weight, modes, tensor_format.max_ranks(modes))
    torch.testing.assert_close(tensor_format.reconstruct(cores, modes), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ORACLES)
@given(
    channels=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    rank=st.integers(1, 4),
)
def test_macs_are_what_the_stages_execute(
    name: str, channels: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], rank: int
) -> None:
    assume(math.prod(kernel) > 1)
    tensor_format = get_format(name)
    network = nn.Sequential(nn.Conv2d(*channels, kernel, stride, bias=False))
    (spec,) = compressible_layers(network, (channels[0], 7, 7))
    modes = tensor_format.modes(spec)
    ranks = tensor_format.expand(modes, rank)
    counted = {
        way: count_macs(ORACLES[name].stages(way, spec, ranks), (channels[0], 7, 7))
        for way in tensor_format.stage_macs(spec, modes, ranks)
    }
    assert tensor_format.stage_macs(spec, modes, ranks) == counted
    assert tensor_format.macs(spec, modes, ranks) == min(counted.values())
    assert counted[tensor_format.execution(spec, modes, ranks)] == min(counted.values())


def test_the_registry_lists_describes_and_refuses() -> None:
    assert {"tensor_ring", "tensor_train", "tucker", "cp", "spatial_svd"} <= set(list_formats())
    assert all(get_format(name).name == name and get_format(name).description for name in list_formats())
    with pytest.raises(
        DecompositionError, match=r"there is no format 'tensor_rings'.*Did you mean 'tensor_ring'"
    ):
        get_format("tensor_rings")
    with pytest.raises(DecompositionError, match="there is a format 'cp' already"):
        register_format(type(get_format("cp")))


MATRIX = WeightModes((6,), (5,), 1)


class OfOnes(TwoMatrices):
    """W = A Q, whose start has an A of ones."""

    name = "of_ones"

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        return [weight.new_ones(len(weight), ranks[0]), weight.flatten(1)[: ranks[0]]]


class Claimed(OfOnes):
    """A has zeros above its diagonal, though `set_output` says that it may be any matrix."""

    name = "claimed"

    def halves(self, cores: Any, modes: Any) -> Any:
        return cores[0].tril(), cores[1]

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        vectors = torch.linalg.svd(weight.flatten(1), full_matrices=False).U[:, : ranks[0]]
        return [vectors, vectors.T @ weight.flatten(1)]


class Structured(Claimed):
    """The same without that claim."""

    name = "structured"
    set_output = TensorFormat.set_output


def test_a_start_that_approximates_nothing_is_found() -> None:
    with pytest.raises(AssertionError):
        FormatContract().test_the_start_approximates_and_larger_ranks_approximate_better(OfOnes(), MATRIX)


@pytest.mark.parametrize("weigh_outputs", [False, True])
def test_a_wrong_claim_that_the_output_half_is_free_is_found(weigh_outputs: bool) -> None:
    contract = FormatContract()
    with pytest.raises(AssertionError):
        contract.test_a_fit_gains_on_the_start_and_reports_its_true_error(Claimed(), MATRIX, weigh_outputs)
    with pytest.raises(AssertionError):
        contract.test_the_output_half_can_be_set(Claimed(), MATRIX)
    contract.test_a_fit_gains_on_the_start_and_reports_its_true_error(Structured(), MATRIX, weigh_outputs)


@pytest.mark.parametrize("modes", [MATRIX, WeightModes((6,), (5,), 9)])
def test_the_error_of_a_structured_output_half_is_the_true_one(modes: WeightModes) -> None:
    weight = normal((6, 5, modes.kernel))
    fit = fit_weight(Structured(), weight, modes, (3,))
    assert fit.error == pytest.approx(relative_error(Structured(), fit.cores, weight, modes), rel=1e-6)


def test_a_format_that_does_not_say_what_its_cores_stand_for_is_refused() -> None:
    class Silent(OfOnes):
        name = "silent"
        halves = TensorFormat.halves

    with pytest.raises(DecompositionError, match=r"'silent'.*define halves or reconstruct"):
        register_format(Silent)
