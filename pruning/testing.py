"""Test the contracts of pruners, your own included; needs pytest.

`class TestMine(CriterionContract): names = ("mine",)` in a test file is enough; for a learned mask take
`MaskContract` likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pruning.groups import ChannelGroup, channel_groups, removable_groups
from pruning.masks import ChannelMask
from pruning.registry import get_pruner
from pruning.removal import remove_channels
from pruning.selection import keep_share


class CriterionContract:
    """Contract of a criterion, a function that scores the units of channel groups.

    The fixtures `network`, `groups` and `images` can be replaced by others.

    Attributes:
        names: Registered names of the criteria that are tested.
    """

    names: Sequence[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every criterion."""
        metafunc.parametrize("name", self.names)

    @pytest.fixture
    def network(self) -> nn.Module:
        """A network to prune, in evaluation mode."""
        torch.manual_seed(0)
        return _Residual().eval()

    @pytest.fixture
    def images(self) -> torch.Tensor:
        """A batch of its inputs."""
        return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    @pytest.fixture
    def groups(self, network: nn.Module, images: torch.Tensor) -> Sequence[ChannelGroup]:
        """The groups of its channels that can be removed."""
        return removable_groups(channel_groups(network, images))

    def test_it_says_what_it_is(self, name: str) -> None:
        pruner = get_pruner(name)
        assert pruner.description
        assert (pruner.is_mask, pruner.unit) == (False, "channels")

    def test_it_scores_all_units_the_same_for_a_seed_and_changes_nothing(
        self, name: str, network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
    ) -> None:
        network.train()
        before = {key: value.clone() for key, value in network.state_dict().items()}
        scores, again = (
            get_pruner(name).definition(network, groups, images, torch.Generator().manual_seed(3))
            for _ in range(2)
        )
        assert network.training
        assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
        assert all(scores[group.name].shape == (group.units,) for group in groups)
        assert all(torch.equal(scores[key], again[key]) for key in scores)

    def test_what_scores_lowest_can_be_removed(
        self, name: str, network: nn.Module, groups: Sequence[ChannelGroup], images: torch.Tensor
    ) -> None:
        scores = get_pruner(name).definition(network, groups, images, torch.Generator().manual_seed(0))
        smaller = remove_channels(network, keep_share(groups, scores, 0.5), images)
        counts = [sum(p.numel() for p in model.parameters()) for model in (smaller, network)]
        assert counts[0] < counts[1]
        assert smaller.eval()(images).shape == network.eval()(images).shape


class MaskContract:
    """Contract of a learned mask, as mask training relies on it.

    Attributes:
        names: Registered names of the masks that are tested.
    """

    names: Sequence[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every mask."""
        metafunc.parametrize("name", self.names)

    def test_it_says_what_it_is(self, name: str) -> None:
        assert get_pruner(name).is_mask
        assert get_pruner(name).description

    def test_gates_close_for_good(self, name: str) -> None:
        mask = get_pruner(name).definition(5)
        assert isinstance(mask, ChannelMask)
        features = torch.randn(2, 5, 3, 3)
        assert mask(features).shape == features.shape
        rows = (mask.gates, mask.deterministic_gates, mask.penalty, mask.scores)
        for row in (*rows, mask.open_units):
            assert row().shape == (5,)
        closing = torch.tensor([True, False, True, False, False])
        mask.close(closing)
        for row in rows:
            assert not row()[closing].any()
        assert mask.open_units().tolist() == (~closing).tolist()

    def test_nothing_changes_when_it_is_frozen(self, name: str) -> None:
        mask, features = get_pruner(name).definition(5), torch.randn(2, 5, 3, 3)
        mask.close(torch.tensor([True, False, True, False, False]))
        mask.freeze()
        assert not any(parameter.requires_grad for parameter in mask.parameters())
        assert torch.equal(mask.train()(features), mask.eval()(features))


class _Residual(nn.Module):
    """A convolution, a residual block and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.inner = nn.Conv2d(6, 8, 3, padding=1)
        self.outer = nn.Conv2d(8, 6, 3, padding=1)
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.outer(torch.relu(self.inner(x))))
        return self.last(x.mean((2, 3)))
