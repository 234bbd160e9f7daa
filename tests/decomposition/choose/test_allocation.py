"""Spending a budget: it always holds, and the choice is the best one where that can be checked."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition.choose.allocation import allocate, allocate_many
from decomposition.choose.budget import Budget
from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.errors import DecompositionError
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, Factorise


def made_up(costs: list[int], errors: list[float], generators: Sequence[str] = ()) -> CandidateSet:
    """A site of made-up costs, in parameters and (twice as many) MACs, and errors."""
    spec = LayerSpec("layer", 0, "linear", 1, 1, (), (), 1, False)
    operations = [*((Factorise("tucker", (j + 1,)),) for j in range(len(costs) - 1)), ()]
    names = [*(generators or ["tucker"] * (len(costs) - 1)), ""]
    return CandidateSet(
        spec,
        tuple(
            Candidate(done, Cost(cost, 2 * cost, 4 * cost), error, name)
            for done, cost, error, name in zip(operations, costs, errors, names, strict=True)
        ),
    )


@st.composite
def site_lists(draw: st.DrawFn, layers: int = 4, candidates: int = 4) -> list[CandidateSet]:
    sites = []
    for _ in range(draw(st.integers(1, layers))):
        count = draw(st.integers(0, candidates))
        costs = sorted(draw(st.sets(st.integers(1, 1000), min_size=count + 1, max_size=count + 1)))
        errors = draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))
        sites.append(made_up(costs, [*sorted(errors, reverse=True), 0.0]))
    return sites


def budget_of(sites: list[CandidateSet], available: float, fixed: int = 0) -> Budget:
    total = sum(int(site.params[-1]) for site in sites) + fixed
    return Budget(min(1.0, (available + fixed) / total), "params", total, fixed)


def spent(sites: list[CandidateSet], choices: np.ndarray, measure: str = "params") -> int:
    return sum(int(site.cost(measure)[j]) for site, j in zip(sites, choices, strict=True))


def loss(sites: list[CandidateSet], choices: np.ndarray | tuple[int, ...]) -> float:
    return float(sum(site.errors[j] ** 2 for site, j in zip(sites, choices, strict=True)))


def best_loss(sites: list[CandidateSet], available: float) -> float:
    """The least loss within the budget, by trying everything."""
    everything = itertools.product(*(range(len(site)) for site in sites))
    return min(loss(sites, js) for js in everything if spent(sites, np.array(js)) <= available)


def hull_steps(site: CandidateSet) -> list[float]:
    """How much the loss falls from corner to corner of the lower convex hull of (cost, squared error)."""
    corner, falls, squares = 0, [], site.errors**2
    while corner < len(site) - 1:
        rest = np.arange(corner + 1, len(site))
        slopes = (squares[corner] - squares[rest]) / (site.params[rest] - site.params[corner])
        following = int(rest[len(rest) - 1 - int(np.argmax(slopes[::-1]))])
        falls.append(float(squares[corner] - squares[following]))
        corner = following
    return falls


@given(
    sites=site_lists(),
    share=st.floats(0, 1),
    fixed=st.integers(0, 500),
    log_weights=st.none() | st.lists(st.floats(-20, 20), min_size=4, max_size=4),
    measure=st.sampled_from(["params", "macs"]),
)
def test_the_budget_always_holds(
    sites: list[CandidateSet], share: float, fixed: int, log_weights: list[float] | None, measure: str
) -> None:
    least = sum(int(site.cost(measure).min()) for site in sites) + fixed
    total = sum(int(site.cost(measure)[-1]) for site in sites) + fixed
    budget = Budget(least / total + share * (1 - least / total), measure, total, fixed)
    weights = None if log_weights is None else np.array(log_weights[: len(sites)])
    try:
        choices = allocate(sites, budget, weights)
    except DecompositionError:
        assert least > budget.available  # the least itself, missed by a rounding of the fraction
        return
    assert spent(sites, choices, measure) + fixed <= budget.fraction * total + 1e-9
    assert all(0 <= j < len(site) for site, j in zip(sites, choices, strict=True))


@given(sites=site_lists(), share=st.floats(0, 1))
def test_the_loss_is_the_least_up_to_one_step_of_the_convex_hull(
    sites: list[CandidateSet], share: float
) -> None:
    least, most = spent(sites, np.zeros(len(sites), int)), sum(int(site.params[-1]) for site in sites)
    budget = budget_of(sites, least + share * (most - least) + 1e-6)
    gap = max((fall for site in sites for fall in hull_steps(site)), default=0.0)
    found = loss(sites, allocate(sites, budget))
    assert best_loss(sites, budget.available) - 1e-12 <= found
    assert found <= best_loss(sites, budget.available) + gap + 1e-12


@given(sites=site_lists(), share=st.floats(0, 1))
def test_no_site_and_no_two_could_change_and_lose_less(sites: list[CandidateSet], share: float) -> None:
    least, most = spent(sites, np.zeros(len(sites), int)), sum(int(site.params[-1]) for site in sites)
    budget = budget_of(sites, least + share * (most - least) + 1e-6)
    choices = allocate(sites, budget)
    for first, second in itertools.combinations_with_replacement(range(len(sites)), 2):
        for both in itertools.product(range(len(sites[first])), range(len(sites[second]))):
            changed = choices.copy()
            changed[[first, second]] = both
            if spent(sites, changed) <= budget.available:
                assert loss(sites, choices) <= loss(sites, changed) * (1 + 1e-8) + 1e-12


@given(sites=site_lists(), share=st.floats(0.01, 1), numbers=st.sets(st.integers(0, 3)))
def test_no_site_stays_as_it_is_that_must_change(
    sites: list[CandidateSet], share: float, numbers: set[int]
) -> None:
    sites = [
        replace(site, must_change=number in numbers and len(site) > 1) for number, site in enumerate(sites)
    ]
    least = sum(int(site.params.min()) for site in sites)
    budget = budget_of(sites, least + share * (sum(int(site.params[-1]) for site in sites) - least))
    for choices in (allocate(sites, budget), *allocate_many(sites, budget, np.zeros((2, len(sites))))):
        assert budget.kept(sites, choices)
        assert not any(site.must_change and j == site.dense for site, j in zip(sites, choices, strict=True))


@given(sites=site_lists(), shift=st.floats(-5, 5))
def test_a_common_shift_of_the_importance_changes_nothing(sites: list[CandidateSet], shift: float) -> None:
    budget = budget_of(sites, sum(int(site.params[-1]) for site in sites) * 0.7 + 1e-6)
    if spent(sites, np.zeros(len(sites), int)) > budget.available:
        return
    plain, shifted = (allocate(sites, budget, np.full(len(sites), s)) for s in (0.0, shift))
    assert loss(sites, shifted) == pytest.approx(loss(sites, plain), rel=1e-9)


@given(
    sites=site_lists(), share=st.floats(0, 1), weights=st.lists(st.floats(-20, 20), min_size=12, max_size=12)
)
def test_many_allocations_at_once_are_those_one_by_one_but_for_the_rest(
    sites: list[CandidateSet], share: float, weights: list[float]
) -> None:
    least, most = spent(sites, np.zeros(len(sites), int)), sum(int(site.params[-1]) for site in sites)
    budget = budget_of(sites, least + share * (most - least) + 1e-6)
    log_weights = np.array(weights).reshape(3, 4)[:, : len(sites)]
    for found, weighting in zip(allocate_many(sites, budget, log_weights), log_weights, strict=True):
        filled = allocate(sites, budget, weighting)
        assert max(spent(sites, found), spent(sites, filled)) <= budget.available
        weighed = [
            sum(np.exp(w) * site.losses[j] for w, site, j in zip(weighting, sites, choices, strict=True))
            for choices in (filled, found)
        ]
        assert weighed[0] <= weighed[1] * (1 + 1e-9)


def test_importance_decides_who_gets_the_budget() -> None:
    sites = [made_up([10, 100], [0.5, 0.0]) for _ in range(3)]
    budget = budget_of(sites, 120)
    for favourite in range(3):
        choices = allocate(sites, budget, np.eye(3)[favourite])
        assert choices.tolist() == np.eye(3, dtype=int)[favourite].tolist()


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_fractions_that_are_none_are_refused(fraction: float) -> None:
    with pytest.raises(DecompositionError, match=r"budget\.macs=.*\(0, 1\]"):
        Budget(fraction, "macs", 100, 0)


GENERATORS = ("cp", "tucker", "tensor_ring")


@st.composite
def mixed_lists(draw: st.DrawFn) -> list[CandidateSet]:
    """Sites where each generator proposes a grid of its own, as a library of several formats has them."""
    sites = []
    for _ in range(draw(st.integers(1, 3))):
        costs, errors, names = list[int](), list[float](), list[str]()
        for generator in GENERATORS:
            count = draw(st.integers(0, 3))
            costs += sorted(draw(st.sets(st.integers(1, 999), min_size=count, max_size=count)))
            losses = draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))
            errors += sorted(losses, reverse=True)
            names += [generator] * count
        sites.append(made_up([*costs, 1000], [*errors, 0.0], names))
    return sites


def only(sites: Sequence[CandidateSet], generator: str) -> list[CandidateSet]:
    """The sites with the candidates of one generator alone."""
    return [
        site.subset([j for j, each in enumerate(site.candidates) if each.generator in (generator, "")])
        for site in sites
    ]


def within(sites: list[CandidateSet], available: float) -> float | None:
    """The loss of an allocation, or None where nothing keeps the budget."""
    try:
        return loss(sites, allocate(sites, budget_of(sites, available)))
    except DecompositionError:
        return None


@given(sites=mixed_lists(), share=st.floats(0, 1))
def test_with_several_generators_no_more_is_lost_than_with_the_best_of_them_up_to_one_step(
    sites: list[CandidateSet], share: float
) -> None:
    efficient = [site.efficient("params") for site in sites]
    least, most = spent(efficient, np.zeros(len(sites), int)), 1000 * len(sites)
    available = least + share * (most - least) + 1e-6
    step = max((fall for site in efficient for fall in hull_steps(site)), default=0.0)
    found = within(efficient, available)
    assert found is not None
    for generator in GENERATORS:
        alone = within(only(sites, generator), available)
        assert alone is None or found <= alone + step + 1e-12


@given(sites=mixed_lists(), log_price=st.floats(-12, 0))
def test_on_the_convex_hull_several_generators_lose_no_more_than_any_of_them(
    sites: list[CandidateSet], log_price: float
) -> None:
    efficient = [site.efficient("params") for site in sites]
    on_hull = [int(np.argmin(site.errors**2 + np.exp(log_price) * site.params)) for site in efficient]
    available = spent(efficient, np.array(on_hull)) + 1e-6
    found = within(efficient, available)
    assert found is not None
    assert found == pytest.approx(best_loss(sites, available), rel=1e-9, abs=1e-12)
    for generator in GENERATORS:
        alone = within(only(sites, generator), available)
        assert alone is None or found <= alone + 1e-12


@given(sites=mixed_lists(), share=st.floats(0, 1))
def test_candidates_that_others_beat_are_never_missed(sites: list[CandidateSet], share: float) -> None:
    efficient = [site.efficient("params") for site in sites]
    available = 1000 * len(sites) * share
    if spent(efficient, np.zeros(len(sites), int)) > available:
        return
    assert best_loss(efficient, available) == pytest.approx(best_loss(sites, available), abs=1e-15)
