"""Whole residual blocks as candidates of a search: where they are, what they cost, the plans they become."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from untrained import with_statistics

from decomposition import (
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    LatencyTable,
    apply_plan,
    build_structure,
    count_macs,
    count_parameters,
)
from rankrl.data import Images
from rankrl.device import Precision
from rankrl.errors import ConfigError
from rankrl.models.zoo import CifarResNet
from rankrl.networks.module import ModuleNetwork, block_removals
from rankrl.networks.network import CandidateOptions
from rankrl.operations import RemoveBlock, removed_blocks
from rankrl.options.search import BudgetOptions
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, PlanEvaluator, ScoredImages
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.session import SearchGoal, check_reachable
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.timing.layer_latency import LayerTimer, time_sites

SHAPE = (1, 8, 8)
REMOVABLE = ["layer1.0", "layer1.1", "layer2.1", "layer3.1"]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """An untrained ResNet-14 whose batch norms do something."""
    torch.manual_seed(0)
    return with_statistics(CifarResNet(2, SHAPE[0], 5))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def library(network: nn.Module, images: torch.Tensor) -> FitLibrary:
    return FitLibrary.calibrated(
        network,
        SHAPE,
        "spatial_svd",
        images,
        precisions=["float32", "int8"],
        removals=block_removals(network, SHAPE),
    )


@pytest.fixture(scope="module")
def problem(network: nn.Module, library: FitLibrary) -> SearchProblem:
    return SearchProblem.from_model(
        network, library.all_candidates(limit=2), SHAPE, macs=0.4, library=library
    )


@pytest.fixture(scope="module")
def evaluator(network: nn.Module, library: FitLibrary, problem: SearchProblem) -> PlanEvaluator:
    generator = torch.Generator().manual_seed(2)
    held_out = Images(
        torch.randint(256, (40, *SHAPE), dtype=torch.uint8, generator=generator),
        torch.randint(5, (40,), generator=generator),
    )
    plain = EvaluatorOptions(augmented=False)
    return PlanEvaluator(
        network,
        library,
        problem,
        ScoredImages(held_out, (0.5,), (0.25,)),
        options=plain,
        # Whatever this machine computes fastest: logits are compared with those of a torch network.
        precision=Precision(torch.device("cpu"), torch.float32),
    )


def without(problem: SearchProblem, block: str) -> tuple[int, ...]:
    """Return the choices that remove a block, and nothing else."""
    return tuple(
        int(np.flatnonzero(site.removed)[0]) if site.removal == RemoveBlock(block) else site.dense
        for site in problem.sites
    )


def test_layers_of_a_block_leave_together(network: nn.Module, problem: SearchProblem) -> None:
    removals = block_removals(network, SHAPE)
    assert list(dict.fromkeys(each.operation.block for each in removals.values())) == REMOVABLE  # type: ignore[attr-defined]
    assert [name for name, each in removals.items() if each.last] == [f"{name}.conv2" for name in REMOVABLE]
    for site in problem.sites:
        assert (site.removal is None) == (site.name not in removals)


def test_costs_are_those_of_the_networks_that_plans_become(
    network: nn.Module, problem: SearchProblem
) -> None:
    generator, counts = np.random.default_rng(0), set()
    for _ in range(8):
        choices = tuple(random_choices(problem, generator).tolist())
        plan = CompressionPlan.from_json(problem.plan(choices, "a test").to_json())
        counts.add(len(removed_blocks(plan.chosen(RemoveBlock))))
        built = build_structure(network, plan)
        cost = problem.cost(choices)
        assert problem.keeps_budget(choices)
        assert cost.macs == count_macs(built, SHAPE) <= 0.4 * problem.macs
        assert cost.params == count_parameters(built)
    assert len(counts) > 1


def test_half_a_block_is_no_plan(problem: SearchProblem) -> None:
    whole = without(problem, "layer1.1")
    (first, second) = (j for j, site in enumerate(problem.sites) if site.removal == RemoveBlock("layer1.1"))
    assert problem.budget is not None
    assert np.isfinite(problem.budget.spent(problem.sites, whole))
    for position in (first, second):
        parted = (*whole[:position], problem.sites[position].dense, *whole[position + 1 :])
        assert problem.budget.spent(problem.sites, parted) == np.inf
        assert not problem.keeps_budget(parted)
        extra = problem.budget.extra(problem.sites, np.array(whole), position)[0]
        staying = ~problem.sites[position].removed
        assert np.isinf(extra[staying]).all()


def test_the_score_is_that_of_a_network_whose_block_adds_its_mean(
    network: nn.Module, problem: SearchProblem, evaluator: PlanEvaluator, library: FitLibrary
) -> None:
    copied = CifarResNet(2, SHAPE[0], 5).eval()
    copied.load_state_dict(network.state_dict())
    block = copied.get_submodule("layer2.1")
    assert library.moments is not None
    mean = library.moments["layer2.1.conv2"].mean
    added = block.conv2.weight.detach().double().flatten(1) @ mean  # type: ignore[operator, union-attr]
    nn.init.zeros_(block.conv2.weight)  # type: ignore[union-attr, arg-type]
    block.bn2.running_mean -= added.float()  # type: ignore[union-attr, operator]
    logits = evaluator.forward(without(problem, "layer2.1"), 0, evaluator.batches).clone()
    (batch,) = evaluator._x
    with torch.no_grad():
        expected = copied(batch.float())
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_what_a_block_does_is_put_down_to_its_last_layer(
    problem: SearchProblem, evaluator: PlanEvaluator
) -> None:
    divergences = evaluator.divergences(1)
    for site, values in zip(problem.sites, divergences, strict=True):
        for index in np.flatnonzero(site.removed):
            last = site.name.endswith("conv2")
            assert site.losses[index] == pytest.approx(site.importance if last else 0)
            assert (values[index] > 0) == last


@pytest.mark.parametrize("selector", ["greedy", "local", "bayes", "tpe", "uniform", "divergence"])
def test_selectors_keep_the_budget_and_blocks_whole(
    problem: SearchProblem, evaluator: PlanEvaluator, network: nn.Module, selector: str
) -> None:
    measured = replace(problem, divergences=evaluator.divergences)
    chosen = create_selector(selector, measured, seed=0, episodes=4)
    for _ in range(3):
        proposals = chosen.propose()
        for each in proposals:
            assert problem.keeps_budget(each.choices)
            build_structure(network, problem.plan(each.choices, selector))
        chosen.observe(proposals, [0.5] * len(proposals))


def test_a_plan_without_a_block_is_applied_with_ranks_and_integers(
    network: nn.Module, problem: SearchProblem, images: torch.Tensor
) -> None:
    choices = list(without(problem, "layer1.1"))
    generator = np.random.default_rng(3)
    for position, site in enumerate(problem.sites):
        if site.removal != RemoveBlock("layer1.1"):
            choices[position] = int(generator.choice(np.flatnonzero(~site.removed)))
    plan = problem.plan(choices, "a test")
    small = apply_plan(network, plan, images)
    assert isinstance(small.get_submodule("layer1.1"), nn.Identity)
    assert count_macs(small, SHAPE) == problem.cost(choices).macs
    assert bool(torch.isfinite(small(images)).all())


def test_blocks_that_cannot_be_chosen_for_as_a_whole_stay(network: nn.Module, images: torch.Tensor) -> None:
    library = FitLibrary.calibrated(
        network, SHAPE, "spatial_svd", None, skip=["layer1.0.conv2"], removals=block_removals(network, SHAPE)
    )
    assert {name.rpartition(".")[0] for name in library.lister.removals} == set(REMOVABLE[1:])


def test_borders_are_counted_around_a_block_that_is_gone(library: FitLibrary) -> None:
    """The layers in front and behind become neighbours: one border where they differ, else none."""
    sites = [library.unfitted(name, limit=1) for name in library.specs]
    sites = [site for site in sites if site.name.startswith(("layer1.0", "layer1.1", "layer2.0"))]
    # No candidate is left out where every one is faster than the dense layer.
    times = {site.name: [0.5] * site.dense + [1.0] for site in sites}
    table = LatencyTable(times, borders={site.name: 0.25 for site in sites})
    attached = table.attach(sites)
    budget = table.budget(1.0, attached)
    gone = RemoveBlock("layer1.1")

    def pick(site_index: int, integer: bool) -> int:
        site = attached[site_index]
        wanted = site.removal == gone
        return next(
            j
            for j, each in enumerate(site.candidates)
            if (each.removed is not None) == wanted and each.integer == integer
        )

    def crossed(kinds: list[bool]) -> float:
        return budget.crossed(attached, [pick(j, kind) for j, kind in enumerate(kinds)])

    names = [site.name for site in attached]
    assert names == [
        *("layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2"),
        *("layer2.0.conv1", "layer2.0.conv2"),
    ]
    assert crossed([True] * 6) == 0
    assert crossed([True, True, True, True, False, False]) == 0.25
    assert crossed([False, False, True, True, True, True]) == 0.25
    first, second = pick(2, True), pick(3, False)
    choices = [pick(0, True), pick(1, True), first, second, pick(4, True), pick(5, True)]
    assert budget.spent(attached, choices) == np.inf


@pytest.mark.slow
def test_a_removed_block_takes_its_addition_with_it(
    network: nn.Module, library: FitLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerTimer, "addition", lambda *_: 1e3)  # milliseconds; all else is microseconds
    sites = library.all_candidates(limit=1)
    modules = dict(network.named_modules())
    measured = time_sites(LayerTimer(batch=4, threads=1, runs=3), modules, sites)
    for site in sites:
        times = np.array(measured.times[site.name])
        last = site.name in {f"{name}.conv2" for name in REMOVABLE}
        assert ((times[~site.removed] >= 1e3) == last).all()
        assert (times[site.removed] < 1e-3).all()


def test_what_cannot_be_is_refused(network: nn.Module) -> None:
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(ConfigError, match=r"decomposition\.blocks: the network has no residual block"):
        block_removals(plain, SHAPE)
    candidates = CandidateOptions(("spatial_svd",), blocks=True)
    with pytest.raises(ConfigError, match=r"decomposition\.blocks removes as many blocks as a budget asks"):
        check_reachable(ModuleNetwork(network, SHAPE), candidates, SearchGoal(reward="amc"))
    with pytest.raises(DecompositionError, match=r"budget\.macs=0\.001 cannot be reached"):
        check_reachable(ModuleNetwork(network, SHAPE), candidates, SearchGoal(BudgetOptions(macs=0.001)))
