"""The benchmark script compares like with like."""

import bench_decomposition as bench
import pytest
import torch

from decomposition.formats import get_format
from decomposition.network.geometry import WeightModes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "rival",
    [
        *("tensor_train", "tensor_ring", "partial_tucker"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor_ring_als", "parafac")),
    ],
)
def test_both_sides_solve_the_same_problem(rival: str) -> None:
    weight = bench.synthetic_weight(12)
    result = bench.duel(weight, bench.RIVALS[rival], ratio=3.0, repeats=1, iterations=20)
    assert 0 < result.error < 1
    assert 0 < result.rival_error < 1
    assert result.error <= 1.05 * result.rival_error
    assert min(result.seconds, result.rival_seconds) > 0


@pytest.mark.parametrize("name", ["tensor_train", "tensor_ring", "tucker", "cp"])
def test_ranks_are_within_the_ratio_and_accepted_by_tensorly(name: str) -> None:
    modes = WeightModes((16,), (16,), 9)
    tensor_format = get_format(name)
    ranks = bench.common_ranks(tensor_format, modes, 6.0)
    assert tensor_format.params(modes, ranks) * 6 <= modes.elements
    assert name != "tensor_ring" or ranks[0] * ranks[1] <= 16


def test_synthetic_weights_are_reproducible_and_decay() -> None:
    weight = bench.synthetic_weight(16)
    assert weight.shape == (16, 16, 9)
    assert torch.equal(weight, bench.synthetic_weight(16))
    values = torch.linalg.svdvals(weight.flatten(1))
    assert values[0] > 2 * values[-1]


def test_weights_of_large_networks_are_random_with_a_falling_spectrum() -> None:
    weight = next(bench.spectral_network("resnet18", 32).parameters()).detach().flatten(1)
    values = torch.linalg.svdvals(weight)
    falling = torch.arange(1, len(values) + 1).rsqrt()
    torch.testing.assert_close(values / values[0], falling, rtol=1e-3, atol=1e-3)
