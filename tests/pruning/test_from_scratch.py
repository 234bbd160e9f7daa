"""The baseline of the same widths: it has the pruned network's shape and none of its weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pruning import PruningError, remove_channels, untrained_copy

Build = Callable[[str], nn.Module]


def test_it_has_the_widths_and_fresh_weights(build: Build, images: torch.Tensor) -> None:
    pruned = remove_channels(build("plain_chain"), {"conv1": [0, 2], "dense1": [1, 3, 5]}, images)
    before = {key: value.clone() for key, value in pruned.state_dict().items()}
    fresh = untrained_copy(pruned)
    for (name, old), new in zip(pruned.named_parameters(), fresh.parameters(), strict=True):
        assert old.shape == new.shape
        assert not torch.equal(old, new), name
    assert all(torch.equal(value, before[key]) for key, value in pruned.state_dict().items())
    assert not fresh.bn1.running_mean.any()


def test_the_seed_decides_and_the_global_generator_stays(build: Build) -> None:
    network = build("plain_chain")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = untrained_copy(network, 1), untrained_copy(network, 1), untrained_copy(network, 2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.conv1.weight, second.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_parameters_that_cannot_be_drawn_again_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

    with pytest.raises(PruningError, match=r"1 \(Scale\) cannot be drawn anew.*reset_parameters"):
        untrained_copy(nn.Sequential(nn.Linear(2, 2), Scale()))
