"""Rank heuristics: each one within the budget, each one true to its rule."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition.choose.budget import Budget
from decomposition.choose.candidates import CandidateSet
from decomposition.choose.heuristics import (
    energy,
    get_heuristic,
    greedy,
    list_heuristics,
    matrix_rank,
    plan_by_heuristic,
    register_heuristic,
    uniform,
    vbmf,
)
from decomposition.choose.library import FitLibrary
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.network.cost import count_macs, count_parameters
from decomposition.network.layers import compressible_layers, inspect_layers
from decomposition.operations import Factorise, dense_cost
from decomposition.plan.plan import CompressionPlan

SHAPE = (4, 9, 9)
QUICK = FitOptions(iterations=3)
SEVERAL = ("tucker", "tensor_ring", "cp")
FORMATS = ["tucker", "tensor_ring", SEVERAL]


@functools.cache
def fitted(name: str | tuple[str, ...]) -> tuple[FitLibrary, tuple[CandidateSet, ...], int, int]:
    """A library of a network with unequal layers, its sites, all parameters and those of no site."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 1)
    )
    with torch.no_grad():
        model[3].weight.mul_(torch.logspace(0, -2, 8)[:, None, None, None])
    specs = compressible_layers(model, SHAPE)
    library = FitLibrary(model, specs, name, options=QUICK)
    total = count_parameters(model)
    sites = tuple(site.efficient("params") for site in library.all_candidates())
    return library, sites, total, total - sum(spec.params for spec in specs)


def costs(sites: tuple[CandidateSet, ...], choices: np.ndarray, measure: str = "params") -> int:
    return sum(int(site.cost(measure)[j]) for site, j in zip(sites, choices, strict=True))


def with_times(site: CandidateSet, times: list[float]) -> CandidateSet:
    """The site with made-up times, however slow."""
    return replace(
        site,
        candidates=tuple(
            replace(each, cost=replace(each.cost, time=time))
            for each, time in zip(site.candidates, times, strict=True)
        ),
    )


def budget_for(name: str | tuple[str, ...], share: float) -> Budget:
    """A budget between the least that can be reached (0) and the dense network (1)."""
    _, sites, total, fixed = fitted(name)
    least = costs(sites, np.zeros(len(sites), int)) + fixed
    return Budget(min(1.0, (least + share * (total - least) + 1e-6) / total), "params", total, fixed)


@pytest.mark.parametrize("name", FORMATS, ids=str)
@pytest.mark.parametrize("heuristic", list_heuristics())
@given(share=st.floats(0, 1))
def test_every_heuristic_keeps_the_budget(heuristic: str, name: str | tuple[str, ...], share: float) -> None:
    library, sites, _, _ = fitted(name)
    budget = budget_for(name, share)
    choices = get_heuristic(heuristic).choose(library, sites, budget)
    assert choices.shape == (len(sites),)
    assert all(0 <= j < len(site) for j, site in zip(choices, sites, strict=True))
    assert costs(sites, choices) <= budget.available


@pytest.mark.parametrize("heuristic", list_heuristics())
def test_every_heuristic_spends_most_of_the_budget(heuristic: str) -> None:
    library, sites, _, _ = fitted("tucker")
    largest_step = max(int(np.diff(site.params).max()) for site in sites)
    for share in (0.2, 0.5, 0.8):
        budget = budget_for("tucker", share)
        choices = get_heuristic(heuristic).choose(library, sites, budget)
        assert costs(sites, choices) > budget.available - largest_step


@pytest.mark.parametrize("heuristic", list_heuristics())
def test_every_heuristic_keeps_everything_dense_when_all_may_be_kept(heuristic: str) -> None:
    library, sites, _, _ = fitted("tucker")
    choices = get_heuristic(heuristic).choose(library, sites, budget_for("tucker", 1.0))
    assert [int(j) for j in choices] == [len(site) - 1 for site in sites]


@pytest.mark.parametrize("heuristic", list_heuristics())
def test_every_heuristic_names_the_least_that_can_be_reached(heuristic: str) -> None:
    library, sites, total, fixed = fitted("tucker")
    choose = get_heuristic(heuristic).choose
    with pytest.raises(DecompositionError, match="cannot be reached") as caught:
        choose(library, sites, Budget(0.01, "params", total, fixed))
    least = float(re.findall(r"the least is (\S+)", str(caught.value))[0])
    assert choose(library, sites, Budget(least, "params", total, fixed)).tolist() == [0] * len(sites)


@pytest.mark.parametrize("heuristic", list_heuristics())
def test_a_budget_of_macs_holds_although_macs_may_exceed_the_dense_layers(heuristic: str) -> None:
    library, sites, _, _ = fitted("tucker")
    total = sum(site.spec.macs for site in sites)
    for fraction in (0.4, 0.7, 1.0):
        budget = Budget(fraction, "macs", total, 0)
        choices = get_heuristic(heuristic).choose(library, sites, budget)
        assert costs(sites, choices, "macs") <= budget.available


@pytest.mark.parametrize("heuristic", list_heuristics())
@given(data=st.data(), share=st.floats(0, 1))
def test_a_budget_of_measured_latency_holds(heuristic: str, data: st.DataObject, share: float) -> None:
    library, sites, _, _ = fitted("tucker")
    seconds = [
        data.draw(st.lists(st.floats(1e-4, 1e-3), min_size=len(site), max_size=len(site))) for site in sites
    ]
    timed = [with_times(site, times) for site, times in zip(sites, seconds, strict=True)]
    total, least = sum(times[-1] for times in seconds), sum(map(min, seconds))
    budget = Budget(min(1.0, (least + share * (total - least)) / total + 1e-9), "latency", total, 0.0)
    choices = get_heuristic(heuristic).choose(library, timed, budget)
    assert sum(times[j] for times, j in zip(seconds, choices, strict=True)) <= budget.available + 1e-12


@pytest.mark.parametrize("name", FORMATS, ids=str)
@given(share=st.floats(0, 1))
def test_uniform_keeps_equal_shares_up_to_the_last_step(name: str | tuple[str, ...], share: float) -> None:
    library, sites, _, _ = fitted(name)
    choices = uniform(library, sites, budget_for(name, share))
    shares = [site.params / site.params[-1] for site in sites]
    largest = max(kept[j] for kept, j in zip(shares, choices, strict=True) if j) if any(choices) else 0
    for kept, j in zip(shares, choices, strict=True):
        assert j + 1 == len(kept) or kept[j + 1] >= largest


@pytest.mark.parametrize("name", FORMATS, ids=str)
@given(share=st.floats(0, 1))
def test_energy_lifts_the_worst_layer_highest(name: str | tuple[str, ...], share: float) -> None:
    library, sites, _, _ = fitted(name)
    budget = budget_for(name, share)

    def worst(choices: np.ndarray) -> float:
        return max(float(site.errors[j]) for site, j in zip(sites, choices, strict=True))

    others = [choose(library, sites, budget) for choose in (uniform, vbmf, greedy)]
    assert worst(energy(library, sites, budget)) <= min(map(worst, others)) + 1e-12


@given(share=st.floats(0, 1))
def test_greedy_loses_least_up_to_one_step(share: float) -> None:
    library, sites, _, _ = fitted("tucker")
    budget = budget_for("tucker", share)

    def loss(choices: np.ndarray) -> float:
        return float(sum(site.errors[j] ** 2 for site, j in zip(sites, choices, strict=True)))

    step = max(float(-np.diff(site.errors**2).min()) for site in sites)
    found = loss(greedy(library, sites, budget))
    for choose in (uniform, energy, vbmf):
        assert found <= loss(choose(library, sites, budget)) + step


def noisy_low_rank(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    left, core, right = (
        torch.randn(shape, generator=generator) for shape in ((16, rank), (rank, rank, 9), (rank, 16))
    )
    weight = torch.einsum("or,rsk,si->oik", left, core, right)
    noise = torch.randn(16, 16, 9, generator=generator)
    return (weight / weight.std() + 0.05 * noise).reshape(16, 16, 3, 3)


def test_vbmf_gives_ranks_in_proportion_to_the_signal() -> None:
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, bias=False) for _ in range(2)))
    with torch.no_grad():
        for layer, rank in zip(model, (2, 6), strict=True):
            layer.weight.copy_(noisy_low_rank(rank))  # type: ignore[union-attr, operator]
    specs = compressible_layers(model, (16, 8, 8))
    library = FitLibrary(model, specs, "tucker", options=FitOptions(iterations=0))
    sites = library.all_candidates(limit=100)
    total = count_parameters(model)
    first, second = vbmf(library, sites, Budget(630 / total, "params", total, 0))
    chosen = [site.candidates[j].operations[0] for site, j in zip(sites, (first, second), strict=True)]
    ranks = [max(operation.ranks) for operation in chosen if isinstance(operation, Factorise)]
    assert ranks == [2, 6]
    assert max(sites[0].errors[first], sites[1].errors[second]) < 0.1


def test_the_registry_lists_describes_and_refuses() -> None:
    assert {"uniform", "energy", "vbmf", "greedy"} <= set(list_heuristics())
    for name in list_heuristics():
        heuristic = get_heuristic(name)
        assert heuristic.name == name
        assert heuristic.description
        assert "\n" not in heuristic.description
    with pytest.raises(DecompositionError, match=r"there is no heuristic 'best'; .*greedy"):
        get_heuristic("best")
    with pytest.raises(DecompositionError, match="there is a heuristic 'greedy' already"):
        register_heuristic("greedy", "again")(greedy)


def additive_loss(model: nn.Module, plan: CompressionPlan, sites: Sequence[CandidateSet]) -> float:
    """What a plan loses by the sum over its layers, and a check that all it does was a candidate."""
    total = 0.0
    for site in sites:
        (loss,) = {
            float(site.losses[j])
            for j, each in enumerate(site.candidates)
            if each.operations == plan[site.name].operations
        }
        total += loss
    return total


@pytest.mark.parametrize(
    "measure", ["params", *(pytest.param(name, marks=pytest.mark.slow) for name in ("macs", "bytes"))]
)
def test_of_several_formats_each_layer_takes_what_serves_it_best(small_net: nn.Module, measure: str) -> None:
    shape = (3, 10, 10)
    images = torch.randn(32, *shape, generator=torch.Generator().manual_seed(0))
    middle: nn.Conv2d = small_net[3]  # type: ignore[index, assignment]
    with torch.no_grad():  # a weight that Tucker meets with few numbers, CP with many
        factors = (torch.randn(3, 3, 3, 3), torch.randn(12, 3), torch.randn(8, 3))
        middle.weight.copy_(torch.einsum("abyx,oa,ib->oiyx", *factors))
    sites = {  # of equal fits; of formats that are one in a layer a set of several holds the first
        formats: FitLibrary.calibrated(small_net, shape, formats, images, options=QUICK).all_candidates(
            limit=12
        )
        for formats in (SEVERAL, *SEVERAL)
    }
    efficient = [site.efficient(measure) for site in sites[SEVERAL]]
    step = max(float(-np.diff(site.losses).min()) for site in efficient)
    used = set[str]()
    for fraction in (0.18, 0.22):
        losses: dict[str | tuple[str, ...], float] = {}
        for formats in sites:
            plan = plan_by_heuristic(
                small_net,
                shape,
                formats,
                "greedy",
                fraction,
                measure=measure,
                calibration=images,
                candidates=12,
                options=QUICK,
            )
            assert kept_fraction(small_net, shape, plan, measure) <= fraction
            losses[formats] = additive_loss(small_net, plan, sites[formats])
            if formats == SEVERAL:
                used |= {each.format for each in plan.chosen(Factorise).values()}
        assert losses[SEVERAL] <= min(losses.values()) + step
    assert len(used) > 1


def kept_fraction(model: nn.Module, shape: tuple[int, ...], plan: CompressionPlan, measure: str) -> float:
    total = count_macs(model, shape)
    if measure != "macs":
        total = count_parameters(model) * (4 if measure == "bytes" else 1)
    specs = plan.specs(model)
    saved = sum(
        getattr(dense_cost(spec), measure) - getattr(layer.cost(spec), measure)
        for layer, spec in zip(plan, specs, strict=True)
    )
    return (total - saved) / total


@pytest.mark.parametrize(
    ("heuristic", "measure"),
    [*((name, "params") for name in list_heuristics()), ("greedy", "macs"), ("greedy", "bytes")],
)
def test_a_plan_in_one_call_keeps_the_budget(small_net: nn.Module, heuristic: str, measure: str) -> None:
    shape = (3, 10, 10)
    images = torch.randn(8, *shape, generator=torch.Generator().manual_seed(0))
    told: list[tuple[str, int, int]] = []
    plan = plan_by_heuristic(
        small_net,
        shape,
        "tucker",
        heuristic,
        0.6,
        measure=measure,
        calibration=images.split(4),
        candidates=4,
        options=QUICK,
        progress=lambda *step: told.append(step),
    )
    assert kept_fraction(small_net, shape, plan, measure) <= 0.6
    assert plan.chosen_by == heuristic
    assert [layer.name for layer in plan] == ["0", "3", "7"]
    assert told == [("fit layers", done, 3) for done in (1, 2, 3)]
    assert {each.format for each in plan.chosen(Factorise).values()} == {"tucker"}
    assert CompressionPlan.from_json(plan.to_json()) == plan


def test_a_plan_without_data_and_with_tensorised_modes(small_net: nn.Module) -> None:
    plan = plan_by_heuristic(
        small_net, (3, 10, 10), "tensor_ring", "greedy", 0.5, tensorised=True, candidates=3, options=QUICK
    )
    assert kept_fraction(small_net, (3, 10, 10), plan, "params") <= 0.5
    assert any(each.factors for each in plan.chosen(Factorise).values())


def test_layers_that_cannot_be_decomposed_count_as_fixed_cost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, groups=2), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    plan = plan_by_heuristic(model, (4, 8, 8), "tucker", "energy", 0.5, options=QUICK)
    assert "groups=2" in (plan["0"].reason or "")
    assert kept_fraction(model, (4, 8, 8), plan, "params") <= 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heuristic": "best"}, "there is no heuristic 'best'"),
        ({"tensor_format": "svd"}, "there is no format 'svd'"),
        ({"measure": "seconds"}, "unknown measure 'seconds'; choose from params, macs, bytes, latency"),
        ({"fraction": 0.0}, r"budget\.params=0\.0"),
        ({"fraction": 1.2}, r"budget\.params=1\.2"),
        ({"fraction": 0.01}, "cannot be reached"),
        ({"calibration": []}, "calibration set is empty"),
        ({"tensorised": True}, "no tensorised form"),
    ],
)
def test_senseless_requests_are_refused(small_net: nn.Module, change: dict, message: str) -> None:
    arguments = {"tensor_format": "tucker", "heuristic": "greedy", "fraction": 0.5} | change
    with pytest.raises(DecompositionError, match=message):
        plan_by_heuristic(small_net, (3, 10, 10), options=QUICK, candidates=2, **arguments)


def test_a_model_without_decomposable_layers_is_refused_with_the_reasons() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    assert len(inspect_layers(model, (4, 8, 8))) == 1
    with pytest.raises(DecompositionError, match=r"no layer that can be decomposed \(0: grouped"):
        plan_by_heuristic(model, (4, 8, 8), "tucker", "greedy", 0.5)
    with pytest.raises(DecompositionError, match="no convolution or linear layer"):
        plan_by_heuristic(nn.Sequential(nn.ReLU()), (4,), "tucker", "greedy", 0.5)


def low_rank(rows: int, columns: int, rank: int, noise: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right, rest = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, rank), (rank, columns), (rows, columns))
    )
    return left @ right + noise * rest


@given(
    sides=st.tuples(st.integers(30, 70), st.integers(30, 120)),
    rank=st.integers(1, 8),
    noise=st.floats(0.01, 0.3),
    seed=st.integers(0, 1000),
)
def test_rank_and_noise_are_recovered_in_both_orientations(
    sides: tuple[int, int], rank: int, noise: float, seed: int
) -> None:
    matrix = low_rank(*sides, rank, noise, seed)
    found, turned = matrix_rank(matrix), matrix_rank(matrix.T)
    assert found.rank == turned.rank == rank
    assert found.noise_variance == pytest.approx(noise**2, rel=0.2)
    assert turned.noise_variance == pytest.approx(found.noise_variance, rel=1e-4)


@given(scale=st.floats(1e-6, 1e6))
def test_the_unit_of_the_matrix_does_not_matter(scale: float) -> None:
    matrix = low_rank(40, 60, 5, 0.2)
    found, scaled = matrix_rank(matrix), matrix_rank(scale * matrix)
    assert scaled.rank == found.rank
    assert scaled.noise_variance == pytest.approx(scale**2 * found.noise_variance, rel=1e-4)


@pytest.mark.parametrize(
    ("matrix", "rank", "variance"),
    [
        (low_rank(64, 576, 0, 0.5), 0, pytest.approx(0.25, rel=0.02)),  # pure noise
        (low_rank(50, 80, 3, 0.0), 3, pytest.approx(0, abs=1e-20)),
        (torch.zeros(3, 5), 0, 0.0),
    ],
)
def test_signal_and_noise_alone(matrix: torch.Tensor, rank: int, variance: object) -> None:
    found = matrix_rank(matrix)
    assert (found.rank, found.noise_variance) == (rank, variance)


@pytest.mark.parametrize("shape", [(1, 1), (1, 20), (20, 1), (2, 2)])
def test_matrices_too_small_to_tell_signal_from_noise(shape: tuple[int, int]) -> None:
    found = matrix_rank(torch.ones(shape) + torch.eye(*shape))
    assert 0 <= found.rank <= min(shape)
    assert found.noise_variance > 0


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        *((torch.zeros(shape), "needs a matrix") for shape in ((3,), (0, 4), (2, 2, 2))),
        *((torch.tensor([[1.0, bad]]), "NaN or infinite") for bad in (float("nan"), float("inf"))),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(matrix: torch.Tensor, message: str) -> None:
    with pytest.raises(DecompositionError, match=message):
        matrix_rank(matrix)
