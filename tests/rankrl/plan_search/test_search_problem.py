"""What selectors know of a network, and what a plan costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition import Cost, Factorise, FitLibrary, FitOptions, LayerPlan, build_structure
from decomposition.errors import DecompositionError
from decomposition.network.cost import count_macs, count_parameters
from rankrl.errors import ConfigError
from rankrl.plan_search.envs import create_action_map
from rankrl.plan_search.space.problem import SearchProblem

SHAPE = (1, 8, 8)


def test_the_dense_plan_costs_what_the_network_costs(small_problem, small_network) -> None:
    params = count_parameters(small_network)
    expected = Cost(params, count_macs(small_network, SHAPE), 4 * params)
    assert small_problem.cost([site.dense for site in small_problem.sites]) == expected


@given(data=st.data())
def test_a_plan_costs_what_the_network_under_it_costs(small_problem, small_network, data) -> None:
    choices = tuple(data.draw(st.integers(0, site.dense)) for site in small_problem.sites)
    small = build_structure(small_network, small_problem.plan(choices, "test"))
    cost = small_problem.cost(choices)
    assert (cost.params, cost.macs) == (count_parameters(small), count_macs(small, SHAPE))
    assert cost.bytes == sum(parameter.nbytes for parameter in small.parameters())
    assert cost.time is None


def test_the_preset_keeps_the_budget_with_and_without_one(small_problem, small_network) -> None:
    assert small_problem.keeps_budget(small_problem.preset)
    free = SearchProblem.from_model(small_network, small_problem.sites, SHAPE)
    assert free.cost(free.preset).params <= free.params / 2


@given(data=st.data(), measure=st.sampled_from(["params", "macs", "bytes"]))
def test_a_budget_is_kept_or_not_by_what_it_counts(small_problem, small_network, data, measure) -> None:
    problem = SearchProblem.from_model(small_network, small_problem.sites, SHAPE, **{measure: 0.5})
    assert problem.measure == measure
    choices = tuple(data.draw(st.integers(0, site.dense)) for site in problem.sites)
    dense = problem.cost([site.dense for site in problem.sites])
    kept = getattr(problem.cost(choices), measure) / getattr(dense, measure)
    assert problem.keeps_budget(choices) == (kept <= 0.5)


def test_of_several_formats_only_efficient_candidates_are_searched(
    small_network, small_library, small_problem
) -> None:
    several = FitLibrary(
        small_network,
        list(small_library.specs.values()),
        ("tucker", "cp"),
        moments=small_library.moments,
        options=FitOptions(iterations=3),
    )
    sites = several.all_candidates()
    for measure in ("params", "macs", "bytes"):
        problem = SearchProblem.from_model(small_network, sites, SHAPE, **{measure: 0.5})
        assert problem.sites == tuple(site.efficient(measure) for site in sites)
        assert problem.keeps_budget(problem.preset)
    free = SearchProblem.from_model(small_network, sites, SHAPE)
    assert free.sites == tuple(site.efficient("params") for site in sites)
    assert small_problem.sites == tuple(small_library.all_candidates())


@given(data=st.data())
def test_a_plan_holds_what_its_choices_stand_for(small_problem, data) -> None:
    choices = [data.draw(st.integers(0, site.dense)) for site in small_problem.sites]
    plan = small_problem.plan(choices, "someone")
    assert plan.chosen_by == "someone"
    assert small_problem.names == ("first", "second", "third", "last")
    for site, choice in zip(small_problem.sites, choices, strict=True):
        candidate = site.candidates[choice]
        assert plan[site.name] == LayerPlan(site.name, candidate.operations, candidate.reason)


def test_the_fingerprint_changes_with_the_errors_and_the_budget(small_problem, small_network) -> None:
    def fingerprint(sites, **budget):
        return SearchProblem.from_model(small_network, sites, SHAPE, **budget).fingerprint

    def with_first(**changes):
        first, *rest = small_problem.sites
        candidate = replace(first.candidates[0], **changes)
        return [replace(first, candidates=(candidate, *first.candidates[1:])), *rest]

    sites = list(small_problem.sites)
    same = fingerprint(sites, params=0.5)
    assert same == small_problem.fingerprint
    assert fingerprint(with_first(), params=0.5) == same
    assert fingerprint(sites, params=0.4) != same
    assert fingerprint(sites, macs=0.5) != same
    assert fingerprint(sites, bytes=0.5) != same
    error = sites[0].candidates[0].error
    assert fingerprint(with_first(error=error * 1.0001), params=0.5) != same
    assert (
        fingerprint(with_first(error=float(np.nextafter(error, 1))), params=0.5) == same
    )  # another processor's
    assert fingerprint(with_first(operations=(Factorise("tucker", (1, 2)),)), params=0.5) != same
    assert fingerprint([replace(sites[0], importance=2.0), *sites[1:]], params=0.5) != same


def test_budgets_that_cannot_be_kept_are_refused(small_problem, small_network) -> None:
    for params in (0.0, 1.5, -1.0):
        with pytest.raises(DecompositionError, match=r"budget\.params"):
            SearchProblem.from_model(small_network, small_problem.sites, SHAPE, params=params)
    with pytest.raises(DecompositionError, match="the least is"):
        SearchProblem.from_model(small_network, small_problem.sites, SHAPE, params=0.01)
    with pytest.raises(ConfigError, match="are all set"):
        SearchProblem.from_model(small_network, small_problem.sites, SHAPE, params=0.5, macs=0.5, bytes=0.5)


def test_two_budgets_are_kept_and_told_apart(small_problem, small_network) -> None:
    def problem(**budgets: float) -> SearchProblem:
        return SearchProblem.from_model(small_network, small_problem.sites, SHAPE, **budgets)

    both = problem(params=0.6, macs=0.6)
    assert both.budget.measures == ("macs", "params")
    cost = both.cost(tuple(both.preset))
    assert cost.params <= 0.6 * both.params
    assert cost.macs <= 0.6 * both.macs
    prints = {each.fingerprint for each in (both, problem(params=0.6), problem(params=0.6, macs=0.5))}
    assert len(prints) == 3
    with pytest.raises(ConfigError, match=r"keeps one budget, and budget\.macs and budget\.params are set"):
        create_action_map(both, "rank")


def test_nothing_to_search_is_said(small_network) -> None:
    with pytest.raises(ConfigError, match="no layer"):
        SearchProblem.from_model(small_network, [], SHAPE)
