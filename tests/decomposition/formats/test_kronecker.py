"""The Kronecker format against torch.kron, and its start against the nearest sum of products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decomposition.formats import get_format
from decomposition.network.cost import count_macs
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import inspect_layers
from decomposition.testing import MODES, modes_name, normal, random_cores

KRONECKER = get_format("kronecker")
PLAIN = [modes for modes in MODES if modes.plain]


@pytest.mark.parametrize("modes", PLAIN, ids=modes_name)
def test_the_weight_is_the_sum_of_kronecker_products_at_every_position(modes: WeightModes) -> None:
    first, second = random_cores(KRONECKER, modes, KRONECKER.expand(modes, 3))
    weight = KRONECKER.reconstruct([first, second], modes)
    for position in range(modes.kernel):
        pairs = zip(first, second[..., position], strict=True)
        torch.testing.assert_close(weight[..., position], sum(torch.kron(a, b) for a, b in pairs))


@pytest.mark.parametrize("modes", PLAIN, ids=modes_name)
def test_the_start_finds_a_sum_of_products_again(modes: WeightModes) -> None:
    ranks = KRONECKER.expand(modes, 2)
    weight = KRONECKER.reconstruct(random_cores(KRONECKER, modes, ranks), modes)
    found = KRONECKER.reconstruct(KRONECKER.start(weight, modes, ranks), modes)
    torch.testing.assert_close(found, weight, rtol=1e-9, atol=1e-9)
    noise = normal(tuple(weight.shape), seed=9)
    largest = KRONECKER.start(noise, modes, KRONECKER.max_ranks(modes))
    torch.testing.assert_close(KRONECKER.reconstruct(largest, modes), noise, rtol=1e-9, atol=1e-9)


def test_few_terms_run_in_stages_and_many_contract() -> None:
    dense = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1))
    (spec,) = inspect_layers(dense, (16, 9, 9))
    modes = KRONECKER.modes(spec)
    for rank, execution in ((2, "chain"), (KRONECKER.max_rank(modes), "dense")):
        layer = KRONECKER.build(dense[0], spec, modes, (rank,))  # type: ignore[arg-type]
        assert layer.execution == execution
        assert layer.staged == (execution == "chain")
        assert count_macs(layer, (16, 9, 9)) == KRONECKER.stage_macs(spec, modes, (rank,))[execution]
