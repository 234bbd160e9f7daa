"""`rankrl.search`: any network, any score."""

from __future__ import annotations

import copy
from pathlib import Path

import gymnasium
import pytest
import torch
from torch import nn

import decomposition
import rankrl
from rankrl.errors import ConfigError, NonFiniteError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    ).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(40, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def fidelity(dense: nn.Module, images: torch.Tensor) -> rankrl.api.Score:
    """A score for a network whose output is a map of numbers: minus its distance to the dense one."""
    expected = dense(images)

    def score(network: nn.Module) -> float:
        return -float((network(images) - expected).square().mean())

    return score


@pytest.mark.parametrize("selector", ["ddpg", "greedy", "random"])
def test_network_that_is_no_classifier_is_searched(
    model: nn.Module, images: torch.Tensor, selector: str
) -> None:
    before = copy.deepcopy(model.state_dict())
    score = fidelity(copy.deepcopy(model), images)
    found = rankrl.search(
        model, score=score, calibration=images, params=0.5, selector=selector, episodes=4, candidates=4
    )
    small = decomposition.apply_plan(model, found.plan, images)
    total = decomposition.count_parameters(model)
    assert decomposition.count_parameters(small) <= 0.5 * total
    assert found.best.reward == max(row.reward for row in found.rows)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_search_without_a_budget_is_refused(model: nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="give a budget"):
        rankrl.search(model, score=lambda _: 1.0, calibration=images)


def test_score_that_is_no_number_is_refused(model: nn.Module, images: torch.Tensor) -> None:
    quick = {"calibration": images, "params": 0.5, "selector": "greedy", "candidates": 2}
    with pytest.raises(ConfigError, match="must return one number"):
        rankrl.search(model, score=lambda _: "good", **quick)  # type: ignore[arg-type, return-value]
    with pytest.raises(NonFiniteError, match="must return a finite number"):
        rankrl.search(model, score=lambda _: float("nan"), **quick)  # type: ignore[arg-type]


def test_killed_search_goes_on(model: nn.Module, images: torch.Tensor, tmp_path: Path) -> None:
    score = fidelity(copy.deepcopy(model), images)
    calls = 0

    def failing(network: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return score(network)

    failing.__qualname__ = score.__qualname__
    failing.__module__ = score.__module__
    options = {"calibration": images, "params": 0.5, "selector": "random", "episodes": 6, "candidates": 8}
    whole = rankrl.search(model, score=score, folder=tmp_path / "whole", **options)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        rankrl.search(model, score=failing, folder=tmp_path / "broken", **options)  # type: ignore[arg-type]
    resumed = rankrl.search(model, score=score, folder=tmp_path / "broken", **options)  # type: ignore[arg-type]
    assert resumed.plan == whole.plan
    assert [row.reward for row in resumed.rows] == [row.reward for row in whole.rows]


def test_environment_is_registered_by_importing_the_package() -> None:
    assert "rankrl/RankSelection-v0" in gymnasium.registry


def test_workers_that_cannot_be_are_refused(model: nn.Module, images: torch.Tensor) -> None:
    quick = {"calibration": images, "params": 0.5, "selector": "greedy", "candidates": 2}
    with pytest.raises(ConfigError, match=r"search\.workers must be a whole number >= 1"):
        rankrl.search(model, score=lambda _: 1.0, workers=0, **quick)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="top level of a module"):
        rankrl.search(model, score=lambda _: 1.0, workers=2, **quick)  # type: ignore[arg-type]
