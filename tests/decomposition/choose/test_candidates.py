"""Candidates of layers: ranks, costs, and input channels that are not read."""

import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import (
    Budget,
    Candidate,
    CandidateSet,
    Cost,
    DecompositionError,
    Factorise,
    FitLibrary,
    LatencyTable,
    LayerPlan,
    LayerSpec,
    Quantise,
    allocate,
    allocate_many,
    compressible_layers,
    plan_from_choices,
)
from decomposition.calibration.metric import Narrowing
from decomposition.choose.allocation import CostTable, least_fraction
from decomposition.choose.candidates import MEASURES

SPEC = LayerSpec("layer", 0, "linear", 8, 8, (), (), 1, False)
DENSE = Candidate((), Cost(1000, 5000, 4000, 80.0), 0.0, reason="the plan saves in other layers instead")


def proposed(rank: int, cost: Cost, error: float, generator: str = "tucker") -> Candidate:
    return Candidate((Factorise(generator, (rank,)),), cost, error, generator)


@st.composite
def candidate_sets(draw: st.DrawFn, generators: tuple[str, ...] = ("cp", "tucker")) -> CandidateSet:
    """Candidates of any cost, some dearer than the dense one, some alike; errors may be equal too."""
    counts = st.integers(1, 12)
    costs = st.builds(Cost, counts, counts, counts, counts.map(float))
    errors = st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0])
    number = draw(st.integers(0, 10))
    candidates = [
        proposed(rank + 1, draw(costs), draw(errors), draw(st.sampled_from(generators)))
        for rank in range(number)
    ]
    return CandidateSet(SPEC, (*candidates, Candidate((), draw(costs), 0.0)), draw(st.floats(0, 10)))


def beats(one: Candidate, other: Candidate, measure: str) -> bool:
    """Whether a candidate is no worse in cost and error, and better in one of them."""
    mine, theirs = (
        (each.cost.time if measure == "latency" else getattr(each.cost, measure), each.error)
        for each in (one, other)
    )
    return mine[0] <= theirs[0] and mine[1] <= theirs[1] and mine != theirs


@given(site=candidate_sets(), measure=st.sampled_from(MEASURES))
def test_costs_are_those_of_the_candidates_by_measure(site: CandidateSet, measure: str) -> None:
    wanted = [
        each.cost.time if measure == "latency" else getattr(each.cost, measure) for each in site.candidates
    ]
    assert site.cost(measure).tolist() == wanted
    assert site.params.tolist() == site.cost("params").tolist()
    assert site.macs.tolist() == site.cost("macs").tolist()
    assert site.errors.tolist() == [each.error for each in site.candidates]
    np.testing.assert_allclose(site.losses, [site.importance * each.error**2 for each in site.candidates])
    assert len(site) == len(site.candidates) == site.dense + 1
    assert site.timed


def test_unknown_measures_and_times_that_were_not_taken_are_refused() -> None:
    site = CandidateSet(SPEC, (proposed(1, Cost(1, 1, 1), 0.5), DENSE))
    assert not site.timed
    with pytest.raises(DecompositionError, match="site 'layer': the time of its candidates was not measured"):
        site.cost("latency")
    with pytest.raises(
        DecompositionError, match="unknown measure 'flops'; choose from params, macs, bytes, latency"
    ):
        site.cost("flops")


@given(site=candidate_sets(), measure=st.sampled_from(MEASURES))
def test_the_efficient_ones_are_those_that_nobody_beats_in_order_of_cost(
    site: CandidateSet, measure: str
) -> None:
    found = site.efficient(measure)
    if not site.mixed:
        assert found is site
        return
    dense, rest = site.candidates[-1], site.candidates[:-1]
    assert found.candidates[-1] is dense
    assert (found.spec, found.importance) == (site.spec, site.importance)
    kept = found.candidates[:-1]
    costs, errors = found.cost(measure)[:-1], found.errors[:-1]
    assert (np.diff(costs) > 0).all()
    assert (np.diff(errors) < 0).all()
    assert (costs < found.cost(measure)[-1]).all()
    for each in kept:
        assert not any(beats(other, each, measure) for other in site.candidates)
    for each in rest:  # what is gone costs at least what one that stayed costs, and loses at least as much
        one_of = CandidateSet(SPEC, (each, dense))
        cost = one_of.cost(measure)[0]
        assert any(
            found.cost(measure)[j] <= cost and other.error <= each.error
            for j, other in enumerate(found.candidates)
        )


@given(site=candidate_sets(("tucker",)), measure=st.sampled_from(MEASURES))
def test_candidates_of_one_generator_all_stay(site: CandidateSet, measure: str) -> None:
    assert not site.mixed
    assert site.efficient(measure) is site


def test_what_is_beaten_depends_on_the_measure() -> None:
    small = proposed(1, Cost(100, 900, 400), 0.5, "tucker")
    fast = proposed(2, Cost(300, 200, 1200), 0.5, "cp")
    good = proposed(3, Cost(300, 900, 1200), 0.2, "tensor_ring")
    dear = proposed(4, Cost(1000, 5000, 4000), 0.1, "cp")
    site = CandidateSet(SPEC, (small, fast, good, dear, DENSE))
    assert site.mixed
    assert site.efficient("params").candidates == (small, good, DENSE)
    assert site.efficient("macs").candidates == (fast, good, DENSE)
    assert site.efficient("bytes").candidates == (small, good, DENSE)


def test_of_equals_the_smaller_one_stays() -> None:
    slow = proposed(1, Cost(100, 900, 400), 0.5, "tucker")
    fast = proposed(2, Cost(100, 200, 400), 0.5, "cp")
    for pair in ((slow, fast), (fast, slow)):
        site = CandidateSet(SPEC, (*pair, DENSE))
        assert site.efficient("params").candidates == (fast, DENSE)


@given(site=candidate_sets(), data=st.data())
def test_a_subset_holds_the_candidates_asked_for_in_order(site: CandidateSet, data: st.DataObject) -> None:
    indices = data.draw(
        st.permutations(range(site.dense)).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    found = site.subset([*indices, site.dense])
    assert found.candidates == (*(site.candidates[j] for j in indices), site.candidates[-1])
    assert found.params.tolist() == [*site.params[list(indices)], site.params[-1]]
    assert (found.spec, found.importance, found.layers) == (site.spec, site.importance, site.layers)


def test_a_set_ends_with_the_dense_candidate_or_is_refused() -> None:
    candidate = proposed(1, Cost(1, 1, 1), 0.5)
    for candidates in ((), (candidate,), (DENSE, candidate)):
        with pytest.raises(
            DecompositionError, match="site 'layer': the last candidate must be the dense one"
        ):
            CandidateSet(SPEC, candidates)
    with pytest.raises(DecompositionError, match="the last candidate must be the dense one"):
        CandidateSet(SPEC, (candidate, DENSE)).subset([1, 0])


def test_candidates_print_as_what_they_do() -> None:
    assert str(DENSE) == "dense"
    assert str(proposed(3, Cost(1, 1, 1), 0.5, "cp")) == "cp 3"


def test_a_site_of_several_layers_puts_its_operations_into_each() -> None:
    specs = [replace(SPEC, name=name, index=j) for j, name in enumerate(("first", "other", "second", "lost"))]
    specs[3] = replace(specs[3], refusal="grouped")
    candidate = proposed(2, Cost(10, 10, 40), 0.5)
    site = CandidateSet(specs[0], (candidate, DENSE), layers=("first", "second"))
    assert (site.name, site.layer_names) == ("first", ("first", "second"))
    plan = plan_from_choices([site], [0], specs, (8,), "a test")
    assert plan.layers == (
        LayerPlan("first", candidate.operations),
        LayerPlan("other", reason="it was left out"),
        LayerPlan("second", candidate.operations),
        LayerPlan("lost", reason="grouped"),
    )
    dense = plan_from_choices([site], [1], specs, (8,), "a test")
    assert dense["second"] == LayerPlan("second", reason=DENSE.reason)
    with pytest.raises(ValueError, match="zip"):
        plan_from_choices([site], [0, 1], specs, (8,), "a test")


SHAPE = (3, 10, 10)
costs = st.integers(1, 20).map(float)
errors = st.floats(0.01, 0.9)


def cost(value: float) -> Cost:
    return Cost(round(10 * value), round(10 * value), round(40 * value), value)


@dataclass(frozen=True)
class Gone:
    """Stands for the operation that removes a block, which is another package's."""

    block: str
    kind = "gone"
    stage = -1
    removes = True
    integer = False

    def to_dict(self) -> dict[str, Any]:
        return {"operation": self.kind, "block": self.block}


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[CandidateSet], tuple[float, ...]]:
    """Sites of made-up candidates, some of which read less of the one in front, or compute in integers.

    Some leave the network, together with a neighbour or alone.
    """
    count = draw(st.integers(2, 4))
    reading = [False, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    blocks = draw(st.lists(st.sampled_from([None, "a", "a", "b"]), min_size=count, max_size=count))
    sites = []
    for site in range(count):
        levels = 2 if site + 1 < count and reading[site + 1] else 0

        def candidate(
            operations: tuple[Any, ...], error: float, level: int, levels: int = levels
        ) -> Candidate:
            own = draw(costs)
            narrower = tuple(
                None if draw(st.integers(0, 5)) == 0 and operations else cost(own * share)
                for share in draw(st.lists(st.floats(0.3, 1.1), min_size=levels, max_size=levels))
            )
            reads = tuple(range(4 - level)) if level else None
            return Candidate(operations, cost(own), error, "x", reads=reads, level=level, narrower=narrower)

        found = [
            candidate((Factorise("cp", (j + 1,)),), draw(errors), 0) for j in range(draw(st.integers(1, 2)))
        ]
        found.append(candidate((Quantise(),), draw(errors), 0))
        found += [candidate((), draw(errors), level) for level in (1, 2) if reading[site]]
        block = blocks[site]
        if block is not None:
            gone = Candidate((Gone(block),), cost(0.0), draw(errors), "x", narrower=(None,) * levels)
            found += [gone, replace(gone, passes_int8_through=True)]
        found.append(
            replace(candidate((), 0.0, 0), cost=cost(25.0), narrower=(cost(20.0), cost(12.0))[:levels])
        )
        spec = LayerSpec(str(site), site, "linear", 4, 4, (), (), 1, False)
        sites.append(CandidateSet(spec, tuple(found), producer=str(site - 1) if reading[site] else None))
    borders = draw(st.sampled_from([(), tuple(float(j) for j in range(1, count))]))
    return sites, borders


def everything(sites: list[CandidateSet]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(each)) for each in sites))


def spent_by_hand(sites: list[CandidateSet], borders: tuple[float, ...], choices: tuple[int, ...]) -> float:
    """Sum what a plan spends, one site after the other, from its candidates alone."""
    total = 0.0
    chosen = [site.candidates[j] for site, j in zip(sites, choices, strict=True)]
    for j, each in enumerate(chosen):
        own: Cost | None = each.cost
        if j + 1 < len(chosen) and chosen[j + 1].level:
            own = each.narrower[chosen[j + 1].level - 1]
        total += float("inf") if own is None or own.time is None else own.time
        if borders and j + 1 < len(chosen) and each.integer != chosen[j + 1].integer:
            total += borders[j]
    for (site, here), (behind, there) in pairwise(zip(sites, chosen, strict=True)):
        together = site.removal is not None and site.removal == behind.removal
        if together and (here.removed, here.removed and here.integer) != (
            there.removed,
            there.removed and there.integer,
        ):
            total = float("inf")
    return total


@given(chain=chains())
def test_neighbours_are_counted_together(chain: tuple[list[CandidateSet], tuple[float, ...]]) -> None:
    sites, borders = chain
    budget = Budget(1.0, "latency", 100.0, 3.0, borders)
    table = CostTable(sites, replace(budget, fraction=0.5))
    every = np.array(list(everything(sites)))
    every = every[:: len(every) // 60 + 1]
    used = table.used(every)[:, 0] * (50.0 - 3.0)
    for choices, share in zip(map(tuple, every.tolist()), used, strict=True):
        expected = spent_by_hand(sites, borders, choices)
        assert budget.spent(sites, choices) == pytest.approx(3.0 + expected)
        assert share == pytest.approx(expected)
        if not np.isfinite(expected):
            continue
        for position in range(len(sites)):
            extra = budget.extra(sites, np.array(choices), position)[0]
            for candidate, value in enumerate(extra):
                changed = (*choices[:position], candidate, *choices[position + 1 :])
                assert value == pytest.approx(spent_by_hand(sites, borders, changed) - expected, abs=1e-9)


@given(chain=chains(), multiplier=st.floats(0.001, 10))
def test_the_way_of_least_cost_is_found_exactly(
    chain: tuple[list[CandidateSet], tuple[float, ...]], multiplier: float
) -> None:
    sites, borders = chain
    table = CostTable(sites, Budget(1.0, "latency", 100.0, 0.0, borders))
    price = np.array([[multiplier]])
    chosen = table.least(table.losses + table.shares(price), price)[0]

    def value(choices: tuple[int, ...]) -> float:
        losses = sum(each.losses[j] for each, j in zip(sites, choices, strict=True))
        return float(losses) + multiplier * spent_by_hand(sites, borders, choices) / 100.0

    assert value(tuple(chosen.tolist())) == pytest.approx(min(map(value, everything(sites))))


@given(chain=chains(), share=st.floats(0, 1), seed=st.integers(0, 10))
def test_the_budget_holds(
    chain: tuple[list[CandidateSet], tuple[float, ...]], share: float, seed: int
) -> None:
    sites, borders = chain
    total = spent_by_hand(sites, borders, tuple(site.dense for site in sites))
    budget = Budget(1.0, "latency", total, 0.0, borders)
    least = min(spent_by_hand(sites, borders, choices) for choices in everything(sites)) / total
    assert least_fraction(sites, budget) == pytest.approx(least)
    budget = replace(budget, fraction=min(1.0, least + share * max(0.0, 1 - least) + 1e-9))
    limit = budget.fraction * total * (1 + 1e-9)
    assert spent_by_hand(sites, borders, tuple(allocate(sites, budget).tolist())) <= limit
    weights = np.random.default_rng(seed).standard_normal((3, len(sites)))
    for choices in allocate_many(sites, budget, weights):
        assert spent_by_hand(sites, borders, tuple(choices.tolist())) <= limit


@dataclass(frozen=True)
class Kept:
    """Stands for the operation that removes channels, which is another package's."""

    channels: tuple[int, ...]
    kind = "kept"
    stage = -1
    removes = False


@pytest.fixture(scope="module")
def new_library(untouched_small_net: nn.Module) -> Callable[[], FitLibrary]:
    def calibrated() -> FitLibrary:
        torch.manual_seed(1)
        images = torch.randn(32, *SHAPE)
        return FitLibrary.calibrated(
            untouched_small_net,
            SHAPE,
            "cp",
            images,
            precisions=["float32", "int8"],
            narrowings={"3": Narrowing("0", (6, 3))},
        )

    return calibrated


@pytest.fixture(scope="module")
def library(new_library: Callable[[], FitLibrary]) -> FitLibrary:
    return new_library()


@pytest.fixture(scope="module")
def sites(library: FitLibrary) -> list[CandidateSet]:
    return library.all_candidates(limit=2)


def test_a_library_proposes_layers_that_read_less(library: FitLibrary, sites: list[CandidateSet]) -> None:
    reading = [each for each in sites[1].candidates if each.reads is not None]
    assert [(each.level, str(each)) for each in reading] == [
        (1, "reads 6 channels"),
        (1, "reads 6 channels; int8"),
        (2, "reads 3 channels"),
        (2, "reads 3 channels; int8"),
    ]
    assert sites[1].producer == "0"
    for each in reading:
        weight = library.weight("3", each.operations, each.reads)
        assert not bool(weight[:, [j for j in range(8) if j not in each.reads]].any())
    errors = [each.error for each in reading]
    assert 0 < errors[0] < errors[2]
    assert errors[1] > errors[0]
    assert all(each.narrower == () for each in sites[1].candidates)
    # 8 x 3 x 9 weights and a batch norm's 16 become 6 x 3 x 9 and 12.
    assert sites[0].saved("params")[sites[0].dense].tolist() == [0, 2 * 27 + 4, 5 * 27 + 10]
    assert sites[0].saved("bytes")[sites[0].dense, 2] == 4 * (5 * 27 + 10)


def pickled(function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
    """Run the work of processes in this process."""
    for job in jobs:
        yield pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(job)))))


def test_layers_apart_are_fitted_the_same(
    new_library: Callable[[], FitLibrary], sites: list[CandidateSet]
) -> None:
    library, again = new_library(), []
    library.fit_all(
        [library.unfitted(name, limit=2) for name in library.specs], again.append, workers=pickled
    )
    assert sorted(again, key=lambda site: site.name) == sites
    assert set(library.cache.selections) == {("3", 6), ("3", 3)}


@pytest.mark.slow  # imports torch anew
def test_processes_find_the_same(library: FitLibrary, sites: list[CandidateSet]) -> None:
    assert library.all_candidates(limit=2, workers=1) == sites


def test_ranks_without_room_do_not_go_together_with_fewer_outputs(small_net: nn.Module) -> None:
    narrowings = {"3": Narrowing("0", (2,))}
    specs = compressible_layers(small_net, SHAPE)
    library = FitLibrary(small_net, specs, "tucker", narrowings=narrowings)
    first = library.unfitted("0", limit=8)
    refused = [each.narrower == (None,) for each in first.candidates]
    assert any(refused)
    assert not all(refused)
    assert np.isneginf(first.saved("params")[refused, 1]).all()


def test_a_plan_takes_the_channels_from_the_layer_in_front(
    small_net: nn.Module, sites: list[CandidateSet]
) -> None:
    specs = compressible_layers(small_net, SHAPE)
    index = next(j for j, each in enumerate(sites[1].candidates) if each.level == 2 and not each.operations)
    keep: Any = Kept
    plan = plan_from_choices(sites, [0, index, sites[2].dense], specs, SHAPE, "a test", keep=keep)
    assert plan["0"].operations == (
        Kept(sites[1].candidates[index].reads or ()),
        *sites[0].candidates[0].operations,
    )
    assert plan["3"].operations == ()
    with pytest.raises(DecompositionError, match=r"reads 3 channels, and there is no operation"):
        plan_from_choices(sites, [0, index, sites[2].dense], specs, SHAPE, "a test")


def test_a_table_of_times_knows_narrower_layers(sites: list[CandidateSet]) -> None:
    times = {site.name: [float(j + 1) for j in range(len(site))] for site in sites}
    rows = [[0.9 * time, 0.5 * time] for time in times["0"]]
    table = LatencyTable(times, 1.0, "a test", {}, {"0": rows})
    table = LatencyTable.from_dict(json.loads(json.dumps(table.to_dict())))
    attached = table.attach(sites)
    assert attached[0].saved("latency")[-1].tolist() == pytest.approx(
        [0, 0.1 * times["0"][-1], 0.5 * times["0"][-1]]
    )
    # What was not measured saves nothing.
    plain = replace(table, narrowed={}).attach(sites)[0]
    assert not plain.saved("latency")[plain.dense].any()


def test_candidates_that_read_less_do_not_beat_the_others(sites: list[CandidateSet]) -> None:
    kept = sites[1].efficient("params").candidates
    assert {each.level for each in kept} == {0, 1, 2}
