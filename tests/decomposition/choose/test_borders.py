"""Allocation where integers and floating point meet: borders are paid, and the best way is found exactly."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition import Budget, CandidateSet, LatencyTable, Quantise, allocate, allocate_many
from decomposition.choose.allocation import CostTable, least_fraction
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, Factorise


def site(name: str, floats: list[tuple[float, float]], integers: list[tuple[float, float]]) -> CandidateSet:
    """A site of made-up (time, error), in floating point and in integers; the last float is the dense one."""
    spec = LayerSpec(name, 0, "linear", 1, 1, (), (), 1, False)
    candidates = [
        Candidate((Factorise("cp", (j + 1,)),), Cost(1, 1, 4, time), error, "cp")
        for j, (time, error) in enumerate(floats[:-1])
    ]
    candidates += [
        Candidate((Factorise("cp", (j + 1,)), Quantise()), Cost(1, 1, 1, time), error, "cp")
        for j, (time, error) in enumerate(integers)
    ]
    return CandidateSet(spec, (*candidates, Candidate((), Cost(1, 1, 4, floats[-1][0]), 0.0)))


times = st.floats(0.1, 10)
errors = st.floats(0.01, 0.9)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[CandidateSet], tuple[float, ...]]:
    pairs = st.lists(st.tuples(times, errors), min_size=1, max_size=2)
    count = draw(st.integers(2, 5))
    sites = [site(str(j), [*draw(pairs), (10.0, 0.0)], draw(pairs)) for j in range(count)]
    borders = draw(st.lists(st.floats(0, 5), min_size=count - 1, max_size=count - 1))
    return sites, tuple(borders)


def everything(sites: list[CandidateSet]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(len(each)) for each in sites))


@given(chain=chains(), multiplier=st.floats(0.001, 10))
def test_the_way_of_least_cost_is_found_exactly(
    chain: tuple[list[CandidateSet], tuple[float, ...]], multiplier: float
) -> None:
    sites, borders = chain
    budget = Budget(1.0, "latency", 100.0, 0.0, borders)
    table = CostTable(sites, budget)
    price = np.array([[multiplier]])
    chosen = table.least(table.losses + table.shares(price), price)[0]

    def value(choices: tuple[int, ...] | np.ndarray) -> float:
        losses = sum(each.losses[j] for each, j in zip(sites, choices, strict=True))
        return float(losses) + multiplier * budget.spent(sites, choices) / 100.0

    assert value(chosen) == pytest.approx(min(map(value, everything(sites))))


@given(chain=chains(), share=st.floats(0, 1), seed=st.integers(0, 10))
def test_the_budget_holds_with_its_borders(
    chain: tuple[list[CandidateSet], tuple[float, ...]], share: float, seed: int
) -> None:
    sites, borders = chain
    total = sum(float(each.cost("latency")[each.dense]) for each in sites)
    budget = Budget(1.0, "latency", total, 0.0, borders)
    least = min(budget.spent(sites, choices) for choices in everything(sites)) / total
    assert least_fraction(sites, budget) == pytest.approx(least)
    budget = replace(budget, fraction=min(1.0, least + share * max(0.0, 1 - least) + 1e-9))
    assert budget.spent(sites, allocate(sites, budget)) <= budget.fraction * total * (1 + 1e-9)
    weights = np.random.default_rng(seed).standard_normal((3, len(sites)))
    for choices in allocate_many(sites, budget, weights):
        assert budget.spent(sites, choices) <= budget.fraction * total * (1 + 1e-9)


@given(chain=chains())
def test_what_a_change_costs_is_the_difference_of_the_whole(
    chain: tuple[list[CandidateSet], tuple[float, ...]],
) -> None:
    sites, borders = chain
    budget = Budget(1.0, "latency", 100.0, 3.0, borders)
    choices = np.array([len(each) // 2 for each in sites])
    for position in range(len(sites)):
        for candidate, extra in enumerate(budget.extra(sites, choices, position)[0]):
            changed = choices.copy()
            changed[position] = candidate
            expected = budget.spent(sites, changed) - budget.spent(sites, choices)
            assert extra == pytest.approx(expected, abs=1e-9)


def test_a_border_that_costs_too_much_keeps_neighbours_alike() -> None:
    sites = [site("a", [(4, 0.3), (10, 0)], [(3, 0.31)]), site("b", [(4, 0.3), (10, 0)], [(4.5, 0.31)])]
    free = Budget(0.38, "latency", 20.0, 0.0, (0.0,))
    dear = Budget(0.4, "latency", 20.0, 0.0, (2.0,))
    assert [bool(s.integer[j]) for s, j in zip(sites, allocate(sites, free), strict=True)] == [True, False]
    alike = [bool(s.integer[j]) for s, j in zip(sites, allocate(sites, dear), strict=True)]
    assert alike[0] == alike[1]


def test_a_table_hands_its_borders_to_the_budget() -> None:
    sites = [site("a", [(4, 0.3), (10, 0)], [(3, 0.31)]), site("b", [(4, 0.3), (10, 0)], [(4, 0.31)])]
    table = LatencyTable({"a": (4, 3, 10), "b": (4, 4, 10)}, 1.0, "a test", {"a": 0.5, "b": 0.7})
    budget = table.budget(0.5, sites)
    assert budget.borders == (0.5,)
    assert budget.total == table.total == 21
    assert LatencyTable({"a": (10,)}, borders={"a": 0.0}).budget(0.5, sites[:1]).borders == ()


def test_integers_and_floating_point_do_not_beat_each_other_where_time_counts() -> None:
    mixed = site("a", [(4, 0.3), (5, 0.2), (10, 0)], [(3, 0.1), (6, 0.15)])
    kept = [str(each) for each in mixed.efficient("latency").candidates]
    assert kept == ["cp 1; int8", "cp 1", "cp 2", "dense"]
