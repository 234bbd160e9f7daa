"""Budgets: two at once, borders between integers and floats, and tables of measured times."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from decomposition import (
    Budget,
    CandidateSet,
    DecompositionError,
    FitLibrary,
    FitOptions,
    LatencyTable,
    Quantise,
    allocate,
    allocate_many,
    compressible_layers,
    get_heuristic,
    list_heuristics,
    plan_by_heuristic,
)
from decomposition.choose.allocation import cheapest_choices, check_reachable
from decomposition.choose.candidates import Candidate
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


SHAPE = (3, 10, 10)
QUICK = FitOptions(iterations=3)


def by_params(sites: Sequence[CandidateSet]) -> LatencyTable:
    """A runtime whose time is the number of parameters, but for the first layer, which gains nothing."""
    times = {site.name: tuple(map(float, site.params)) for site in sites}
    *slower, dense = times[sites[0].name]
    times[sites[0].name] = (*(2 * dense for _ in slower), dense)
    return LatencyTable(times, rest=10.0, conditions="a test")


@pytest.fixture
def sites(small_net: nn.Module) -> list[CandidateSet]:
    specs = compressible_layers(small_net, SHAPE)
    return FitLibrary(small_net, specs, "tucker", options=QUICK).all_candidates(limit=4)


def test_slower_candidates_are_left_out_with_the_reason(sites: list[CandidateSet]) -> None:
    attached = by_params(sites).attach(sites)
    assert [len(site) for site in attached] == [1, *map(len, sites[1:])]
    assert attached[0].candidates[0].reason == "no candidate is faster than the dense layer"
    for site, before in zip(attached, sites, strict=True):
        assert site.timed
        assert not before.timed
        assert all(site.cost("latency")[:-1] < site.cost("latency")[-1])
        assert site.cost("latency").tolist() == site.params.tolist()
        kept = [each for each in before.candidates if each.operations] if len(site) > 1 else []
        assert [each.operations for each in site.candidates[:-1]] == [each.operations for each in kept]


@pytest.mark.parametrize("heuristic", ["uniform", "energy", "vbmf", "greedy"])
@pytest.mark.parametrize("fraction", [0.5, 0.8])
def test_heuristics_keep_a_latency_budget(small_net: nn.Module, heuristic: str, fraction: float) -> None:
    tables = []

    measured: list[CandidateSet] = []

    def measure(sites: Sequence[CandidateSet]) -> LatencyTable:
        measured.extend(sites)
        tables.append(by_params(sites))
        return tables[-1]

    plan = plan_by_heuristic(
        small_net,
        SHAPE,
        "tucker",
        heuristic,
        fraction,
        measure="latency",
        latency=measure,
        candidates=6,
        options=QUICK,
    )
    (table,) = tables
    spent = table.rest
    for layer, site in zip(plan, measured, strict=True):
        chosen = [each.operations for each in site.candidates].index(layer.operations)
        spent += table.sites[layer.name][chosen]
    assert spent <= fraction * table.total
    assert plan.layers[0].operations == ()


def test_a_table_survives_json(sites: list[CandidateSet]) -> None:
    table = by_params(sites)
    assert LatencyTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


@pytest.mark.parametrize(
    "values",
    [{}, [1], {"sites": 3}, {"sites": {"0": ["fast"]}}, {"conditions": "", "rest": 0.0, "layers": {}}],
    ids=["empty", "list", "no sites", "no number", "by ranks"],
)
def test_other_values_are_refused(values: Any) -> None:
    whole = {"rest": 0.0, "conditions": "", "borders": {}, "narrowed": {}}
    with pytest.raises(DecompositionError, match="measure anew"):
        LatencyTable.from_dict({**whole, **values} if values and isinstance(values, dict) else values)


def test_incomplete_tables_are_refused(sites: list[CandidateSet], small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match=r"site '0' has \d candidates, .* holds 0 times for it"):
        LatencyTable({}).attach(sites)
    short = by_params(sites).sites | {"3": (1.0, 2.0)}
    with pytest.raises(DecompositionError, match=r"site '3' has \d candidates, .* holds 2 times for it"):
        LatencyTable(short).attach(sites)
    with pytest.raises(DecompositionError, match=r"site '0': .* lacks the dense layer"):
        LatencyTable({"0": ()})
    with pytest.raises(DecompositionError, match=r"site '0': the time of candidate 1 is 0.0.*be positive"):
        LatencyTable({"0": (1.0, 0.0)})
    with pytest.raises(DecompositionError, match="the rest is nan; it must be 0 or more"):
        LatencyTable({"0": (1.0,)}, rest=float("nan"))
    with pytest.raises(DecompositionError, match="needs latency="):
        plan_by_heuristic(small_net, SHAPE, "tucker", "greedy", 0.5, measure="latency")
