"""Layers are ranked by what their compression loses, with what it saves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from decomposition import CandidateSet, Factorise
from decomposition.choose.budget import Budget
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost
from rankrl.plan_search.run import ChosenPlan, layer_costs, search_numbers
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report import LayerRow, RunReport, run_page


def site(name: str, importance: float, *, times: bool) -> CandidateSet:
    spec = LayerSpec(name, 0, "linear", 10, 10, (), (), 1, False)  # type: ignore[arg-type]
    small = Candidate((Factorise("cp", (1,)),), Cost(20, 30, 80, 0.5 if times else None), 0.2, "cp")
    return CandidateSet(
        spec, (small, Candidate((), Cost(100, 120, 400, 2.0 if times else None), 0.0)), importance
    )


@pytest.mark.parametrize("times", [False, True])
def test_losses_and_savings_are_those_of_the_choices(times: bool) -> None:
    sites = tuple(site(name, weight, times=times) for name, weight in (("a", 1.0), ("b", 3.0), ("c", 2.0)))
    measure, total = ("latency", 10.0) if times else ("params", 400.0)
    budget = Budget.of_total(total, sites, measure, 1.0)
    problem = SearchProblem(tuple(each.spec for each in sites), sites, (3,), 400, 400, budget)
    layers = layer_costs(problem, (0, 0, 1))
    assert [each.name for each in layers] == ["b", "a"]
    assert [each.loss for each in layers] == pytest.approx([3 * 0.04, 0.04])
    assert {(each.saved_params, each.saved_macs) for each in layers} == {(80, 90)}
    assert [each.saved_time for each in layers] == ([0.15, 0.15] if times else [None, None])
    both = (
        replace(problem, budget=replace(Budget.of_total(400.0, sites, "params", 1.0), also=budget))
        if times
        else problem
    )
    assert layer_costs(both, (0, 0, 1)) == layers
    chosen = ChosenPlan(plan=both.plan((0, 0, 1), "greedy"), key=(0, 0, 1), layers=layers)
    row = LayerRow("b", (10, 10), (1,), 100, 20, 120, 30)
    cells = set(re.findall(r"<t[hd][^>]*>([^<]*)", run_page(RunReport(search_numbers(chosen), [row]))))
    assert {"Share of the loss", "75.0\N{NO-BREAK SPACE}%"} <= cells
    assert ("Time saved" in cells) == times
    assert search_numbers(replace(chosen, layers=())) == {}
