"""Two budgets at once: both hold, neither is left unused, and what cannot be kept together is said."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decomposition import (
    Budget,
    CandidateSet,
    Quantise,
    allocate,
    allocate_many,
    get_heuristic,
    list_heuristics,
)
from decomposition.choose.allocation import cheapest_choices, check_reachable
from decomposition.choose.candidates import Candidate
from decomposition.errors import DecompositionError
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, Factorise


def random_sites(seed: int, count: int = 5, candidates: int = 4) -> list[CandidateSet]:
    """Sites whose times and bytes have little to do with each other; every second candidate is integer."""
    generator = np.random.default_rng(seed)
    sites = []
    for position in range(count):
        spec = LayerSpec(str(position), 0, "linear", 1, 1, (), (), 1, False)
        found = []
        for rank in range(candidates):
            time, size = generator.uniform(0.5, 9), int(generator.integers(10, 400))
            error = float(np.exp(-time / 9 - size / 400) * generator.uniform(0.5, 1))
            operations = (Factorise("cp", (rank + 1,)), *((Quantise(),) if rank % 2 else ()))
            found.append(Candidate(operations, Cost(1, 1, size, time), error, "cp"))
        dense = Candidate((), Cost(1, 1, 400, 10.0), 0.0)
        sites.append(CandidateSet(spec, (*found, dense)).efficient("latency", "bytes"))
    return sites


def two(sites: list[CandidateSet], latency: float, size: float, borders: tuple[float, ...] = ()) -> Budget:
    totals = [float(sum(site.cost(measure)[-1] for site in sites)) for measure in ("latency", "bytes")]
    second = Budget(size, "bytes", totals[1] + 100, 100)
    return Budget(latency, "latency", totals[0] + 1, 1, borders, second)


def every_loss(sites: list[CandidateSet], budget: Budget) -> list[float]:
    """The losses of all plans that keep both budgets."""
    plans = itertools.product(*(range(len(site)) for site in sites))
    return [loss(sites, plan) for plan in plans if budget.kept(sites, plan)]


def loss(sites: list[CandidateSet], choices: np.ndarray | tuple[int, ...]) -> float:
    return float(sum(site.losses[j] for site, j in zip(sites, choices, strict=True)))


fractions = st.floats(0.2, 1.0)


@given(seed=st.integers(0, 500), latency=fractions, size=fractions, borders=st.booleans())
@example(seed=244, latency=0.385, size=0.397, borders=True)
@example(seed=104, latency=0.32, size=0.5, borders=True)
@example(seed=345, latency=0.25, size=0.84, borders=False)
@example(seed=293, latency=0.65, size=0.65, borders=False)
def test_both_budgets_hold_for_every_way_to_choose(
    seed: int, latency: float, size: float, borders: bool
) -> None:
    sites = random_sites(seed)
    budget = two(sites, latency, size, (0.7, 0.2, 1.1, 0.4) if borders else ())
    if not budget.kept(sites, cheapest_choices(sites, budget)):
        with pytest.raises(DecompositionError, match=r"cannot be reached|not found together"):
            allocate(sites, budget)
        return
    assert budget.kept(sites, allocate(sites, budget))
    weights = np.random.default_rng(seed).standard_normal((3, len(sites)))
    assert all(budget.kept(sites, each) for each in allocate_many(sites, budget, weights))
    for name in set(list_heuristics()) - {"vbmf"}:
        assert budget.kept(sites, get_heuristic(name).choose(None, sites, budget)), name


@pytest.mark.slow
def test_the_loss_is_near_the_least_that_there_is() -> None:
    excesses = []
    for seed in range(40):
        sites = random_sites(seed)
        budget = two(sites, 0.55, 0.5, (0.3,) * 4)
        found = every_loss(sites, budget)
        if found:
            excesses.append(loss(sites, allocate(sites, budget)) / min(found) - 1)
    assert len(excesses) > 30
    assert min(excesses) >= -1e-9
    assert np.median(excesses) < 0.1


@pytest.mark.parametrize("slack", ["latency", "bytes"])
def test_a_budget_that_does_not_bind_changes_nothing(slack: str) -> None:
    for seed in range(10):
        sites = random_sites(seed)
        both = two(sites, *((1.0, 0.5) if slack == "latency" else (0.5, 1.0)))
        binding = both.limits[1] if slack == "latency" else replace(both, also=None)
        alone = allocate(sites, binding)
        if both.kept(sites, alone):
            assert loss(sites, allocate(sites, both)) <= loss(sites, alone) * (1 + 1e-9)


def test_a_second_budget_costs_accuracy_and_is_met() -> None:
    tighter = 0
    for seed in range(10):
        sites = random_sites(seed)
        both = two(sites, 0.6, 0.45)
        alone = allocate(sites, replace(both, also=None))
        together = allocate(sites, both)
        if not both.kept(sites, alone):
            tighter += 1
            assert both.kept(sites, together)
            assert loss(sites, together) > loss(sites, alone) * 0.999
    assert tighter > 3


def test_what_two_budgets_cannot_keep_together_is_said() -> None:
    spec = LayerSpec("a", 0, "linear", 1, 1, (), (), 1, False)
    fast = Candidate((Factorise("cp", (1,)),), Cost(1, 1, 90, 1.0), 0.5, "cp")
    small = Candidate((Factorise("cp", (2,)),), Cost(1, 1, 10, 9.0), 0.5, "cp")
    sites = [CandidateSet(spec, (fast, small, Candidate((), Cost(1, 1, 100, 10.0), 0.0)))]
    budget = Budget(0.2, "latency", 10.0, 0.0, (), Budget(0.2, "bytes", 100, 0))
    with pytest.raises(
        DecompositionError, match="one by one, but not found together: the nearest plan keeps"
    ):
        check_reachable(sites, budget)
    with pytest.raises(DecompositionError, match=r"budget\.bytes=0\.05 cannot be reached"):
        check_reachable(sites, replace(budget, also=Budget(0.05, "bytes", 100, 0)))


def test_two_budgets_of_one_measure_and_three_budgets_are_refused() -> None:
    first, second = Budget(0.5, "bytes", 10, 0), Budget(0.5, "params", 10, 0)
    with pytest.raises(DecompositionError, match="goes together with one other measure"):
        replace(first, also=replace(first, fraction=0.2))
    with pytest.raises(DecompositionError, match="goes together with one other measure"):
        Budget(0.5, "latency", 10, 0, (), replace(first, also=second))
