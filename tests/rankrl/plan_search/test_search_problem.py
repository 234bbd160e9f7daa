"""What choosers know of a network, and what a plan costs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition.cost import count_macs, count_parameters
from decomposition.errors import DecompositionError
from rankrl.errors import ConfigError
from rankrl.plan_search.problem import SearchProblem

SHAPE = (1, 8, 8)


def test_the_dense_plan_costs_what_the_network_costs(small_problem, small_network) -> None:
    dense = small_problem.plan([len(curve) - 1 for curve in small_problem.curves], "test")
    expected = (count_parameters(small_network), count_macs(small_network, SHAPE))
    assert small_problem.cost(dense) == expected


def test_the_preset_keeps_the_budget_with_and_without_one(small_problem, small_network) -> None:
    assert small_problem.keeps_budget(small_problem.plan(small_problem.preset, "greedy"))
    free = SearchProblem.from_model(small_network, small_problem.curves, SHAPE)
    assert free.cost(free.plan(free.preset, "greedy"))[0] <= free.params / 2


@given(data=st.data())
def test_a_plan_is_found_again_from_its_ranks(small_problem, data) -> None:
    choices = [data.draw(st.integers(0, len(curve) - 1)) for curve in small_problem.curves]
    plan = small_problem.plan(choices, "someone")
    assert small_problem.plan_from_ranks(small_problem.ranks(plan), "someone") == plan


def test_the_fingerprint_changes_with_the_errors_and_the_budget(small_problem, small_network) -> None:
    def fingerprint(curves, **budget):
        return SearchProblem.from_model(small_network, curves, SHAPE, **budget).fingerprint

    curves = copy.deepcopy(list(small_problem.curves))
    same = fingerprint(curves, params=0.5)
    assert same == small_problem.fingerprint
    assert fingerprint(curves, params=0.4) != same
    assert fingerprint(curves, macs=0.5) != same
    curves[0].errors[0] = np.nextafter(curves[0].errors[0], 1)
    assert fingerprint(curves, params=0.5) != same


def test_budgets_that_cannot_be_kept_are_refused(small_problem, small_network) -> None:
    for params in (0.0, 1.5, -1.0):
        with pytest.raises(DecompositionError, match=r"budget\.params"):
            SearchProblem.from_model(small_network, small_problem.curves, SHAPE, params=params)
    with pytest.raises(DecompositionError, match="the least is"):
        SearchProblem.from_model(small_network, small_problem.curves, SHAPE, params=0.01)
    with pytest.raises(ConfigError, match="are all set"):
        SearchProblem.from_model(small_network, small_problem.curves, SHAPE, params=0.5, macs=0.5)


def test_nothing_to_search_is_said(small_network) -> None:
    with pytest.raises(ConfigError, match="no layer"):
        SearchProblem.from_model(small_network, [], SHAPE)
