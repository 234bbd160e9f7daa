"""As cheap as possible, losing at most so much: nothing that was measured is better than what is returned."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposition import CandidateSet, CompressionPlan, Factorise, Quantise
from decomposition.choose.budget import Budget
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost
from rankrl.errors import ConfigError
from rankrl.options.search import BudgetOptions
from rankrl.plan_search import measured_plans
from rankrl.plan_search.bounded_loss import REFITS, within_loss
from rankrl.plan_search.latency_budget import attainable
from rankrl.plan_search.measured_plans import (
    MeasuredPlan,
    PlanMeter,
    standard_plans,
    undominated,
    without_most_sensitive,
)
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.latency import RelativeTime

RANKS = (1, 2, 4, 8)
DENSE = Cost(100, 100, 400)


def site(name: str, kind: str, errors: np.ndarray, integer_error: float) -> CandidateSet:
    """Four ranks, each in floating point and in integers, dense integers, and the layer as it is."""
    spec = LayerSpec(name, 0, kind, 10, 10, (), (), 1, False)  # type: ignore[arg-type]
    ranks = [(Factorise("cp", (rank,)), 10 * rank, error) for rank, error in zip(RANKS, errors, strict=True)]
    candidates = [Candidate((each,), Cost(cost, cost, 4 * cost), error, "cp") for each, cost, error in ranks]
    candidates += [
        Candidate((each, Quantise()), Cost(cost, cost, cost), error + integer_error, "cp")
        for each, cost, error in ranks
    ]
    integers = Candidate((Quantise(),), Cost(100, 100, 100), integer_error)
    return CandidateSet(spec, (*candidates, integers, Candidate((), DENSE, 0.0)))


def made_up(seed: int, layers: int = 5) -> SearchProblem:
    random = np.random.default_rng(seed)
    sites = []
    for j in range(layers):
        errors = np.sort(random.uniform(0.05, 1, len(RANKS)))[::-1]
        sites.append(
            site(f"layer{j}", "linear" if j == layers - 1 else "conv2d", errors, random.uniform(0, 0.2))
        )
    total = 400.0 * layers + 100
    budget = Budget.of_total(total, sites, "bytes", 1.0)
    specs = tuple(each.spec for each in sites)
    return SearchProblem(specs, tuple(sites), (3, 8, 8), 100 * layers + 25, 100 * layers, budget)


class Network:
    """A network whose loss and cost differ from what its layers say."""

    def __init__(self, problem: SearchProblem, seed: int) -> None:
        self.problem, self.random = problem, np.random.default_rng(seed)
        self.scale = self.random.uniform(0.2, 3, len(problem.sites))
        self.applied: list[CompressionPlan] = []

    def apply(self, plan: CompressionPlan) -> CompressionPlan:
        self.applied.append(plan)
        return plan

    def loss(self, plan: CompressionPlan) -> float:
        losses = []
        for each, layer in zip(self.problem.sites, plan, strict=True):
            index = [candidate.operations for candidate in each.candidates].index(layer.operations)
            losses.append(each.losses[index])
        return float(self.scale @ losses) / 10

    def apply_and_lose(self, plan: CompressionPlan) -> float:
        return self.loss(self.apply(plan))

    def meter(self, folder: Path | None = None) -> PlanMeter:
        return PlanMeter(self.problem, self.apply_and_lose, None, identity="a test", folder=folder)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3]))
@settings(max_examples=60, deadline=None)
def test_the_loss_is_kept_and_nothing_measured_is_better(seed: int, drop: float) -> None:
    problem = made_up(seed)
    network = Network(problem, seed)
    measure = network.meter()
    best = within_loss(measure, drop)
    assert best.loss <= drop
    assert not any(plan.dominates(best) for plan in measure.plans.values())
    assert best.cost <= min(plan.cost for plan in measure.plans.values() if plan.loss <= drop) * 1.0101
    assert {"all dense", "all int8", "int8 convolutions"} <= {plan.name for plan in measure.plans.values()}
    assert len(network.applied) <= REFITS + 2 * len(standard_plans(problem))
    assert len(set(map(str, network.applied))) == len(network.applied)  # none is made twice


@pytest.mark.parametrize(("share", "drop"), [(0.02, 0.6), (0.04, 1.0), (0.08, 0.1)])
def test_measurements_may_raise_the_least_cost_that_plans_can_reach(share: float, drop: float) -> None:
    problem = made_up(0)
    network, budget = Network(problem, 0), problem.budget
    assert budget is not None

    def dearer(shares: Mapping[Choices, float]) -> SearchProblem:
        raised = replace(budget, fixed=budget.fixed + share * len(shares) * budget.total)
        return replace(problem, budget=raised)

    measure = PlanMeter(problem, network.loss, None, identity="a test", recosted=dearer)
    assert within_loss(measure, drop, around=lambda near: [(0,) * len(near.sites)]).loss <= drop


@pytest.mark.parametrize(
    ("loss", "cost", "exceeded"), [(1.0, 0.6, None), (1.0, 0.4, "cost"), (0.0, 0.6, "loss")]
)
def test_what_exceeds_a_limit_is_known_before_a_plan_is_refitted(
    loss: float, cost: float, exceeded: str | None
) -> None:
    problem = made_up(0)
    network = Network(problem, 0)
    measure = PlanMeter(problem, network.apply_and_lose, lambda _: RelativeTime(0.5), identity="a test")
    measure("all int8", without_most_sensitive(problem.sites, 0))
    assert measure.exceeded("rank 1", (0,) * len(problem.sites), loss=loss, cost=cost) == exceeded
    assert len(network.applied) == 1


@pytest.mark.parametrize(("width", "counts"), [(0.05, True), (0.06, False)])
def test_a_time_of_a_wide_interval_is_told_and_the_expected_one_counts(width: float, counts: bool) -> None:
    problem, told = made_up(0), list[Mapping[Choices, float]]()
    measure = PlanMeter(
        problem,
        Network(problem, 0).loss,
        lambda _: RelativeTime(0.5, width),
        identity="a test",
        ratio=0.9,
        recosted=lambda shares: told.append(shares) or problem,  # type: ignore[func-returns-value]
    )
    key = without_most_sensitive(problem.sites, 0)
    plan, expected = measure("all int8", key), 0.9 * 600 / 2100
    assert plan.expected_cost == pytest.approx(expected)
    assert plan.cost == pytest.approx(0.5 if counts else expected)
    assert (plan.unsure_cost, plan.width) == (None if counts else 0.5, width)
    assert plan.keeps(0.3) is not counts
    assert told == [{key: 0.5} if counts else {}], "times correct others where they count"


def test_what_a_budget_out_of_reach_could_be_is_said() -> None:
    problem = made_up(0)
    assert problem.budget is not None
    said = attainable(problem.sites, problem.budget, 0.9)
    integers, half = map(float, re.findall(r"0\.\d+(?= for)", said))
    assert integers == round(0.9 * 600 / 2100, 3)
    assert integers < half < 0.9, "half a point leaves some layers in integers"
    assert "budget.drop=0.005" in said
    dense = [site.subset([site.dense]) for site in problem.sites]
    assert attainable(dense, problem.budget, 0.9) == ""


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_is_refitted_that_takes_longer_than_one_that_keeps_the_loss(seed: int) -> None:
    problem = made_up(seed)
    network, random = Network(problem, seed), np.random.default_rng(seed)
    order: list[tuple[str, float]] = []  # what is timed and what is refitted, in order
    measure = PlanMeter(
        problem,
        lambda plan: order.append(("refitted", network.loss(plan))) or order[-1][1],  # type: ignore[func-returns-value]
        lambda _: order.append(("timed", random.uniform(0.2, 1.0))) or RelativeTime(order[-1][1]),  # type: ignore[func-returns-value]
        identity="a test",
    )
    within_loss(measure, 0.02)
    best = math.inf
    for number, (what, value) in enumerate(order):
        if what == "refitted":
            kind, share = order[number - 1]
            assert kind == "timed"
            assert number < 4 or share <= best
            best = min(best, share) if value <= 0.02 else best


def test_all_in_integers_is_returned_where_nothing_is_better() -> None:
    problem = made_up(0)
    ruined = site("layer0", "conv2d", np.ones(4), 0.0)
    flat = SearchProblem(
        problem.specs,
        tuple(CandidateSet(each.spec, ruined.candidates) for each in problem.sites),
        problem.input_shape,
        problem.params,
        problem.macs,
        problem.budget,
    )
    best = within_loss(Network(flat, 0).meter(), 0.01)
    assert best.name == "all int8"
    assert best.loss == 0
    assert best.cost == pytest.approx((5 * 100 + 100) / (5 * 400 + 100))


def test_the_original_is_handed_back_where_everything_loses_too_much() -> None:
    problem = made_up(3)
    network = Network(problem, 3)
    network.loss = lambda plan: 0.5  # type: ignore[method-assign]
    best = within_loss(network.meter(), 0.1)
    assert (best.name, best.loss, best.cost) == ("all dense", 0.0, 1.0)


def test_measurements_are_kept_for_a_search_that_goes_on(tmp_path: Path) -> None:
    problem = made_up(5)
    first, again = Network(problem, 5), Network(problem, 5)
    best = within_loss(first.meter(tmp_path), 0.02)
    assert within_loss(again.meter(tmp_path), 0.02) == best
    assert first.applied
    assert not again.applied


def test_the_most_sensitive_layers_stay_in_floating_point_first() -> None:
    problem = made_up(7)
    integers = without_most_sensitive(problem.sites, 0)
    losses = [each.losses[j] for each, j in zip(problem.sites, integers, strict=True)]
    for count in range(len(problem.sites) + 1):
        plan = without_most_sensitive(problem.sites, count)
        spared = [j for j, each in enumerate(problem.sites) if plan[j] == each.dense]
        assert len(spared) == count
        assert sorted(np.argsort(losses)[::-1][:count]) == spared


def test_standard_plans_keep_the_budget_and_differ() -> None:
    problem = made_up(11)
    assert problem.budget is not None
    for fraction in (0.2, 0.3, 0.6, 1.0):
        tight = SearchProblem(
            problem.specs,
            problem.sites,
            problem.input_shape,
            problem.params,
            problem.macs,
            Budget.of_total(problem.budget.total, problem.sites, "bytes", fraction),
        )
        plans = standard_plans(tight)
        assert all(map(tight.keeps_budget, plans.values()))
        assert len(set(plans.values())) == len(plans)
        assert ("all int8" in plans) == (fraction > 0.25)
        assert ("uniform cp" in plans) == (fraction < 1)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 1)), min_size=1, max_size=12))
def test_what_is_returned_is_never_dominated(points: list[tuple[float, float]]) -> None:
    plans = [MeasuredPlan(str(j), (j,), loss, cost, "bytes", 0, 0) for j, (loss, cost) in enumerate(points)]
    for plan in plans:
        best = undominated(plan, plans)
        assert not any(other.dominates(best) for other in plans)
        assert best is plan or best.dominates(plan)


@pytest.mark.parametrize(
    ("cost", "width", "keeps"),
    [(0.5, None, True), (0.495, 0.0, False), (0.49, 0.0, True), (0.49, 0.02, False), (0.48, 0.02, True)],
)
def test_measured_times_keep_a_budget_with_a_margin(cost: float, width: float | None, keeps: bool) -> None:
    assert MeasuredPlan("a plan", (0,), 0.0, cost, "latency", 0.0, cost, width).keeps(0.5) is keeps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.0}, r"budget\.drop=1\.0 is outside \[0, 1\)"),
        ({"drop": 0.01, "params": 0.5}, r"leave budget\.params or budget\.drop out"),
        ({"drop": 0.01, "minimise": "time"}, "none of params, macs, bytes, latency"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BudgetOptions(**options)  # type: ignore[arg-type]


def test_a_bounded_loss_begins_with_everything() -> None:
    assert BudgetOptions(drop=0.01).fractions == {"latency": 1.0}
    assert BudgetOptions(drop=0.01, memory=0.5).numbers["memory"] == 0.5
    assert BudgetOptions(memory=0.5).numbers == {"params": 1.0, "memory": 0.5}
    assert len(BudgetOptions(latency=0.5, bytes=0.5, memory=0.5).numbers) == 3
    assert BudgetOptions(drop=0.01, minimise="bytes").counted == {"params": None, "macs": None, "bytes": 1.0}


def test_a_uniform_plan_takes_other_formats_only_where_they_are_the_same_product() -> None:
    spec = LayerSpec("layer", 0, "conv2d", 10, 10, (), (), 1, False)
    kernel = LayerSpec("kernel", 1, "conv2d", 10, 10, (3, 3), (1, 1), 1, False)
    cost = Cost(50, 50, 200)
    for name, alike in (("cp", True), ("tensor_ring", False)):
        candidate = Candidate((Factorise(name, (2,)),), cost, 0.1, name)
        one = CandidateSet(spec, (candidate, Candidate((), DENSE, 0.0)))
        tucker = Candidate((Factorise("tucker", (2, 2)),), cost, 0.2, "tucker")
        two = CandidateSet(kernel, (tucker, Candidate((), DENSE, 0.0)))
        members = measured_plans.families([one, two])["tucker", False]
        assert [indices.tolist() for indices in members] == [[0, 1] if alike else [1], [0, 1]]
