"""The same search with the same seed finds the same plan as it did before.

For every format and selector `recorded_searches.json` holds what the search below found: its best reward and
when it came, how many different plans were scored, the mean reward of all episodes, and the plan's ranks. A
change of how searches are written must not change them. They were first recorded by commit 46c4ed3, where a
plan was a tuple of ranks, and were equal when searches came to choose among candidates; they were recorded
anew when the fits changed, last by commit 06c4a99 with algebraic fits, so that they are the same on every
processor, when greedy came to exchange cost between layers, and when each step came to draw from a generator
of its own. The learning selectors are not among them.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import (
    Factorise,
    FitLibrary,
    FitOptions,
    collect_moments,
    collect_sensitivities,
    compressible_layers,
)
from rankrl.data import Images
from rankrl.device import Precision
from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import SearchProblem

SHAPE = (1, 8, 8)
EPISODES = 30
RECORDED = json.loads(Path(__file__).with_name("recorded_searches.json").read_text())
# Minimisers go other ways where a processor rounds otherwise; algebraic solutions do not.
ALGEBRAIC = FitOptions(iterations=0)
# Rewards are means of class probabilities in float32, whose last digits are the processor's.
ROUNDING = 1e-7


@pytest.fixture(scope="module")
def problem_in(small_network: nn.Module) -> Callable[[str], SearchProblem]:
    layers = compressible_layers(small_network, SHAPE)
    inputs = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(2))
    moments = collect_moments(small_network, layers, inputs)
    sensitivities = collect_sensitivities(small_network, layers, inputs)

    @functools.cache
    def make(name: str) -> SearchProblem:
        library = FitLibrary(
            small_network, layers, name, moments=moments, sensitivities=sensitivities, options=ALGEBRAIC
        )
        sites = library.all_candidates()
        return SearchProblem.from_model(small_network, sites, SHAPE, params=0.3, library=library)

    return make


@pytest.mark.parametrize("cell", RECORDED)
def test_a_search_finds_what_it_found_before(
    problem_in: Callable[[str], SearchProblem], small_network: nn.Module, small_images: Images, cell: str
) -> None:
    tensor_format, selector = cell.split()
    problem, expected = problem_in(tensor_format), RECORDED[cell]
    assert problem.library is not None
    evaluator = PlanEvaluator(
        small_network,
        problem.library,
        problem,
        ScoredImages(small_images, (0.5,), (0.3,)),
        options=EvaluatorOptions(metric="soft_agreement", augmented=False),
        precision=Precision(torch.device("cpu"), torch.float32),
    )
    selector = create_selector(selector, problem, seed=0, episodes=EPISODES)
    found = run_search(problem, evaluator, selector, episodes=EPISODES)
    chosen = found.plan.chosen(Factorise)
    assert {name: list(operation.ranks) for name, operation in chosen.items()} == expected["ranks"]
    assert {operation.format for operation in chosen.values()} == {tensor_format}
    assert (found.best.episode, found.evaluations) == (expected["episode"], expected["evaluations"])
    mean = sum(row.reward for row in found.rows) / len(found.rows)
    assert found.best.reward == pytest.approx(expected["best_reward"], abs=ROUNDING)
    assert mean == pytest.approx(expected["mean_reward"], abs=ROUNDING)
