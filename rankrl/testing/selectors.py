"""Test the contract of selectors: budgets, seeds, and resuming from a record."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import rich.style  # noqa: F401 (draws from `random` on import, which scikit-learn would do within a test)
import torch
from torch import nn

from decomposition import FitLibrary, FitOptions, compressible_layers
from rankrl.plan_search.selectors import Proposal, Selector, create_selector, selector_class
from rankrl.plan_search.space.problem import Choices, SearchProblem

INPUT_SHAPE = (1, 8, 8)


class SelectorContract:
    """Properties that a search requires of every selector.

    Attributes:
        names: Registered names of the selectors that are tested.
        options: Options of selectors that are slow without them, by their names.
        episodes: Plans that a search may score.
    """

    names: Sequence[str]
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    episodes: ClassVar[int] = 8

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every selector, and for every kind of budget where it takes one."""
        if "measure" in metafunc.fixturenames:
            metafunc.parametrize("measure", ("params", "macs", "bytes"))
        metafunc.parametrize("name", self.names)

    def selector(self, name: str, problem: SearchProblem, seed: int = 0) -> Selector:
        options = self.options.get(name, {})
        return create_selector(name, problem, seed=seed, episodes=self.episodes, **options)

    def test_it_says_what_it_is(self, name: str) -> None:
        assert selector_class(name).description
        assert "problem" not in selector_class(name).default_options()

    def test_every_proposed_plan_keeps_the_budget(self, name: str, measure: str) -> None:
        problem = small_problem(("tucker",), **{measure: 0.6})
        plans = plans_of(self.selector(name, problem), self.episodes)
        assert plans
        assert all(problem.keeps_budget(choices) for choices in plans)
        assert all(type(choice) is int for choices in plans for choice in choices)

    def test_it_chooses_among_the_candidates_of_several_formats(self, name: str) -> None:
        problem = small_problem(("tucker", "cp"), params=0.5)
        plans = plans_of(self.selector(name, problem), 6)
        assert all(problem.keeps_budget(choices) for choices in plans)
        assert any(site.mixed for site in problem.sites)

    def test_the_seed_decides_everything(self, name: str) -> None:
        problem, before = small_problem(("cp",), params=0.6), surroundings()

        def outcome(seed: int) -> list[Proposal]:
            return proposals_of(self.selector(name, problem, seed), 6)

        first, again, other = (outcome(seed) for seed in (1, 1, 2))
        assert again == first
        assert (other != first) == selector_class(name).seeded
        assert surroundings() == before, "random numbers come from generators of the selector's own"

    def test_it_goes_on_from_what_it_is_told(self, name: str) -> None:
        problem = small_problem(params=0.5)
        whole, resumed, again = (self.selector(name, problem) for _ in range(3))
        for _ in range(4):
            proposals = whole.propose()
            recorded = [Proposal(each.choices, each.phase, as_recorded(each.actions)) for each in proposals]
            for selector in (whole, resumed, again):
                selector.observe(recorded, rewards_of(recorded))
        again.propose()
        for _ in range(3):
            expected = whole.propose()
            why = "proposals may depend on problem, seed, options and what was observed, not on propose()"
            assert resumed.propose() == expected, why
            assert again.propose() == expected, why
            for selector in (whole, resumed, again):
                selector.observe(expected, rewards_of(expected))


def as_recorded(actions: Sequence[float]) -> tuple[float, ...]:
    """Return a proposal's actions as they are read from `episodes.csv`."""
    return tuple(json.loads(json.dumps(list(actions))))


@cache
def small_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        ).eval()


@cache
def small_library(formats: tuple[str, ...]) -> FitLibrary:
    layers = compressible_layers(small_network(), INPUT_SHAPE)
    return FitLibrary(small_network(), layers, formats, options=FitOptions(iterations=3))


def small_problem(formats: tuple[str, ...] = ("tucker",), **budget: Any) -> SearchProblem:
    library = small_library(formats)
    sites = library.all_candidates(limit=8)
    problem = SearchProblem.from_model(small_network(), sites, INPUT_SHAPE, library=library, **budget)
    return replace(problem, divergences=lambda _: [site.errors**2 for site in problem.sites])


def rewards_of(proposals: Sequence[Proposal]) -> list[float]:
    return [float(np.tanh(sum(each.choices) / 20)) for each in proposals]


def proposals_of(selector: Selector, steps: int) -> list[Proposal]:
    """Run a selector for `steps` steps, with a reward for larger candidates, and list its proposals."""
    proposed = []
    for _ in range(steps):
        proposals = selector.propose()
        proposed += proposals
        selector.observe(proposals, rewards_of(proposals))
    return proposed


def plans_of(selector: Selector, steps: int) -> list[Choices]:
    return [proposal.choices for proposal in proposals_of(selector, steps)]


def surroundings() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]
