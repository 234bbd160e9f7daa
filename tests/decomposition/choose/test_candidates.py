"""Candidate sets: what each candidate costs and loses, and which of them are worth trying."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition import (
    Candidate,
    CandidateSet,
    Cost,
    DecompositionError,
    Factorise,
    LayerPlan,
    LayerSpec,
    plan_from_choices,
)
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
