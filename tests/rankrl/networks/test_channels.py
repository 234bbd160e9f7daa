"""Channels as candidates of a search: where they are found, what they cost, and the plans they become."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from call_options import layer_options
from torch import nn

import rankrl
from decomposition import CompressionPlan, FitLibrary, build_structure, count_macs, count_parameters
from decomposition.calibration.metric import Narrowing
from rankrl.data import Images
from rankrl.errors import ConfigError
from rankrl.models import create_model
from rankrl.networks.module import ModuleNetwork, channel_narrowings
from rankrl.operations import KeepChannels, kept_channels
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.scores.scoring import FixedFits, ParallelEvaluator
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.workers.processes import LocalCluster, Workers

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def network(three_convolutions: nn.Module) -> nn.Module:
    return three_convolutions


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def library(network: nn.Module, images: torch.Tensor) -> FitLibrary:
    narrowings = channel_narrowings(network, SHAPE, [0.75, 0.25])
    return FitLibrary.calibrated(
        network, SHAPE, "cp", images, precisions=["float32", "int8"], narrowings=narrowings
    )


@pytest.fixture(scope="module")
def problem(network: nn.Module, library: FitLibrary) -> SearchProblem:
    return SearchProblem.from_model(
        network, library.all_candidates(limit=2), SHAPE, macs=0.4, library=library
    )


def test_pairs_of_layers_are_found(network: nn.Module) -> None:
    assert channel_narrowings(network, SHAPE, [0.75, 0.5]) == {
        "3": Narrowing("0", (9, 6)),
        "5": Narrowing("3", (9, 6)),
        "9": Narrowing("5", (12, 8)),
    }
    # In multiples of 8, where there are more channels than that.
    assert channel_narrowings(network, SHAPE, [0.75, 0.3], 8)["5"] == Narrowing("3", (8,))
    found = channel_narrowings(
        create_model("resnet20", input_shape=(3, 32, 32), num_classes=10), (3, 32, 32), [0.5]
    )
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    assert found == {
        f"{block}.conv2": Narrowing(f"{block}.conv1", (2 ** (2 + int(block[5])),)) for block in blocks
    }


@pytest.mark.parametrize(
    ("norms", "sites"), [([], ["1", "2"]), ([nn.LayerNorm(12)], ["2"]), ([nn.RMSNorm(12), nn.GELU()], ["2"])]
)
def test_channels_that_a_norm_takes_together_are_left_to_pruning(
    norms: list[nn.Module], sites: list[str]
) -> None:
    """Without some of them, the others change: more than one layer reads less."""
    first = nn.Sequential(nn.Linear(8, 12), *norms)
    network = nn.Sequential(first, nn.Linear(12, 10), nn.Linear(10, 4))
    assert list(channel_narrowings(network, SHAPE, [0.5])) == sites


@pytest.mark.parametrize(
    ("model", "fractions", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)), [1.5], r"1\.5 is outside \(0, 1\)"),
        (nn.Sequential(nn.Conv2d(1, 4, 3)), [0.5], r"has no two layers of which one alone reads"),
        (nn.LSTM(8, 8), [0.5], r"decomposition\.channels: the network cannot be followed"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(model: nn.Module, fractions: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        channel_narrowings(model, SHAPE, fractions)


def test_costs_are_those_of_the_networks_that_plans_become(
    network: nn.Module, problem: SearchProblem
) -> None:
    generator = np.random.default_rng(0)
    removals = 0
    for _ in range(10):
        choices = tuple(random_choices(problem, generator).tolist())
        plan = problem.plan(choices, "a test")
        removals += len(kept_channels(plan))
        built = build_structure(network, CompressionPlan.from_json(plan.to_json()))
        cost = problem.cost(choices)
        assert problem.keeps_budget(choices)
        assert cost.macs == count_macs(built, SHAPE) <= 0.4 * problem.macs
        assert cost.params == count_parameters(built)
    assert removals > 3


def test_what_a_plan_removes_is_what_its_next_layer_does_not_read(problem: SearchProblem) -> None:
    site = problem.sites[1]
    index = next(j for j, each in enumerate(site.candidates) if each.level == 1)
    choices = [each.dense for each in problem.sites]
    choices[1] = index
    plan = problem.plan(choices, "a test")
    assert plan["0"].operations == (KeepChannels(site.candidates[index].reads or ()),)


@pytest.mark.slow
def test_scores_in_processes_equal_those_of_one(
    network: nn.Module, library: FitLibrary, problem: SearchProblem
) -> None:
    generator = torch.Generator().manual_seed(2)
    held_out = Images(
        torch.randint(256, (40, *SHAPE), dtype=torch.uint8, generator=generator),
        torch.randint(5, (40,), generator=generator),
    )
    data, options = ScoredImages(held_out, (0.5,), (0.25,)), EvaluatorOptions(augmented=False)
    drawn = np.random.default_rng(1)
    plans = [tuple(random_choices(problem, drawn).tolist()) for _ in range(4)]
    alone = PlanEvaluator(network, library, problem, data, options=options)
    one = LocalCluster(Workers(1))
    with ParallelEvaluator(network, library, problem, data, cluster=one, options=options) as evaluator:
        evaluations = evaluator.evaluate(plans)
    assert [each.score for each in evaluations] == [each.score for each in alone.evaluate(plans)]
    fits = FixedFits(library, problem)
    for site in problem.sites:
        for each in site.candidates:
            expected = library.weight(site.name, each.operations, each.reads)
            assert torch.equal(fits.weight(site.name, each.operations, each.reads), expected)


@pytest.mark.slow
def test_narrower_layers_are_timed(network: nn.Module, library: FitLibrary) -> None:
    sites = library.all_candidates(limit=1)
    timer = ModuleNetwork(network, SHAPE).timer(LatencyOptions(batch=4, runs=2))
    table = timer.layers(sites)
    assert set(table.narrowed) == {"0", "3", "5"}
    for site in sites[:-1]:
        rows = np.array(table.narrowed[site.name])
        assert rows.shape == (len(site), 2)
        assert (rows > 0).all()
        factorised = [
            bool(each.operations) and each.operations[0].kind == "factorise" for each in site.candidates
        ]
        # Taken to save nothing, which is on the safe side.
        own = np.array(table.sites[site.name])[:, None]
        assert (rows == own)[factorised].all()
        assert not (rows == own)[np.logical_not(factorised)].all()


@pytest.mark.parametrize("selector", ["greedy", "local", "bayes", "tpe", "uniform"])
def test_selectors_keep_the_budget(problem: SearchProblem, selector: str) -> None:
    chosen = create_selector(selector, problem, seed=0, episodes=4)
    for _ in range(3):
        proposals = chosen.propose()
        assert all(problem.keeps_budget(each.choices) for each in proposals)
        chosen.observe(proposals, [0.5] * len(proposals))


def test_actions_that_count_layers_alone_are_refused(problem: SearchProblem) -> None:
    with pytest.raises(
        ConfigError,
        match=r"with decomposition\.channels or decomposition\.blocks what a layer costs depends on",
    ):
        create_action_map(problem, "rank")


def test_a_search_takes_channels_where_they_pay(
    network: nn.Module, images: torch.Tensor, score_by_agreement: Callable[[nn.Module], float]
) -> None:
    result = rankrl.search(
        network,
        score=score_by_agreement,
        inputs=images,
        macs=0.35,
        selector="greedy",
        decomposition=layer_options("spatial_svd", channels=[0.75, 0.5, 0.25], candidates=1),
    )
    assert kept_channels(result.plan)
    small = rankrl.apply_plan(network, result.plan, images)
    assert count_macs(small, SHAPE) <= 0.35 * count_macs(network, SHAPE)
    assert small(images).shape == (64, 5)


@pytest.fixture
def score_by_agreement(network: nn.Module, images: torch.Tensor) -> Callable[[nn.Module], float]:
    """Share of inputs that a network puts into the class that the dense one does."""
    with torch.no_grad():
        expected = network(images).argmax(1)

    def score(compressed: nn.Module) -> float:
        with torch.no_grad():
            return float((compressed(images).argmax(1) == expected).float().mean())

    return score
