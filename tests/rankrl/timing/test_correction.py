"""A few whole networks correct a table of layers, kind by kind."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import nn

from decomposition import CandidateSet, CompressionPlan, FitLibrary, LatencyTable, Quantise
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, Factorise
from rankrl.networks.module import ModuleNetwork
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.latency_budget import LatencyBudget, first_trials
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.timing.correction import Trial, corrected, correction
from rankrl.timing.latency import RelativeTime

DENSE = Cost(100, 100, 400)


def site(name: str) -> CandidateSet:
    spec = LayerSpec(name, 0, "linear", 1, 1, (), (), 1, False)
    factors = [Factorise("cp", (rank,)) for rank in (1, 2)]
    candidates = [Candidate((each,), DENSE, 0.5 / each.ranks[0], "cp") for each in factors]
    candidates += [Candidate((each, Quantise()), DENSE, 0.51 / each.ranks[0], "cp") for each in factors]
    return CandidateSet(spec, (*candidates, Candidate((Quantise(),), DENSE, 0.01), Candidate((), DENSE, 0.0)))


@pytest.mark.parametrize("factors", [(1, 1, 1, 1, 1), (1.0, 1.3, 1.2, 1.5, 2.0)])
def test_sums_come_to_agree_with_whole_networks(factors: tuple[float, ...]) -> None:
    generator = np.random.default_rng(0)
    sites = [site(str(j)) for j in range(8)]
    times = {each.name: tuple(generator.uniform(0.9, 1.1) * np.array([3, 5, 2, 3, 4, 10])) for each in sites}
    table = LatencyTable(times, 2.0, "a test", {each.name: 0.5 for each in sites})
    kinds = np.array([1, 1, 3, 3, 2, 0])
    true = {name: np.array(each) * np.array(factors)[kinds] for name, each in times.items()}

    def measured(found: Sequence[CandidateSet], choices: np.ndarray) -> float:
        total, integer = table.rest, []
        for each, choice in zip(found, choices, strict=True):
            candidate = each.candidates[choice]
            index = next(
                j for j, c in enumerate(site(each.name).candidates) if c.operations == candidate.operations
            )
            total += true[each.name][index]
            integer.append(candidate.integer)
        return float(total + 0.5 * factors[4] * np.count_nonzero(np.diff(integer))) / table.total

    trials = first_trials(table, sites, measured)
    better = corrected(table, sites, correction(table, trials))
    attached, before = better.attach(sites), table.attach(sites)
    errors = []
    for share in (0.4, 0.5, 0.7, 0.9):
        choices = spend_at_random(attached, better.budget(share, sites), generator)
        expected = measured(attached, choices)
        errors.append(abs(better.budget(1.0, sites).spent(attached, choices) / better.total / expected - 1))
    assert max(errors) < 0.05
    assert len(before) == len(attached)


def test_one_odd_timing_on_the_way_to_a_budget_turns_no_kind_upside_down() -> None:
    parts = np.array([[10.0, 0, 0, 0, 0, 2], [0, 5.0, 0, 2.0, 0.5, 2], [2, 1.0, 3.0, 3.0, 1.0, 2]])
    table = LatencyTable({"a": (12.0,)}, 0.0, "a test")
    exact = [Trial(tuple(each), float(each.sum()) / 12) for each in parts]
    assert np.allclose(correction(table, exact), 1)
    odd = Trial(tuple(parts[1]), 0.84 * exact[1].time)
    assert np.allclose(correction(table, exact, [exact[1]]), 1)
    found = correction(table, exact, [odd])
    assert 0.75 < found.min() <= found.max() <= 1 + 1e-9
    # Half of what it says is taken over: the rest may be its own.
    assert 0.84 < float(found @ parts[1]) / parts[1].sum() < 0.95


def test_a_budget_beside_the_time_is_kept_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    library = FitLibrary.calibrated(model, (3, 12, 12), "tucker", None)
    sites = library.all_candidates(limit=4)

    class Timed(LatencyBudget):
        """One whose layers take as long as they have parameters."""

        def _table(self) -> LatencyTable:
            times = {each.name: tuple(each.params.astype(float).tolist()) for each in sites}
            return LatencyTable(times, 1.0, "a test")

        def measured(self, plan: CompressionPlan) -> RelativeTime:
            kept = sum(layer.cost(library.specs[layer.name]).params for layer in plan)
            return RelativeTime(kept / sum(spec.params for spec in library.specs.values()))

    problem = Timed(
        ModuleNetwork(model, (3, 12, 12)), sites, 0.9, LatencyOptions(), counted={"bytes": 0.7, "macs": None}
    ).problem(library)
    assert problem.budget is not None
    assert problem.budget.measures == ("latency", "bytes")
    cost = problem.cost([int(each) for each in problem.preset])
    assert cost.bytes <= 0.7 * 4 * problem.params


def test_what_was_measured_to_be_slow_does_not_come_back_when_its_kind_is_corrected() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    library = FitLibrary.calibrated(model, (3, 12, 12), "tucker", None)
    sites = library.all_candidates(limit=4)
    slow = sites[1].candidates[-2]  # of highest rank
    times = {each.name: each.params.astype(float) for each in sites}
    times[sites[1].name][-2] = 1.05 * times[sites[1].name][-1]
    table = LatencyTable({name: tuple(each.tolist()) for name, each in times.items()}, 1.0, "a test")

    class Halved(LatencyBudget):
        """One whose factorised layers take half of the time in a network that they take alone."""

        def _table(self) -> LatencyTable:
            return table

        def measured(self, plan: CompressionPlan) -> RelativeTime:
            total = table.rest
            for each in sites:
                operations = [candidate.operations for candidate in each.candidates]
                index = operations.index(plan[each.name].operations)
                total += times[each.name][index] * (0.5 if operations[index] else 1.0)
            return RelativeTime(float(total) / table.total)

    problem = Halved(ModuleNetwork(model, (3, 12, 12)), sites, 0.8, LatencyOptions()).problem(library)
    found = [each.operations for each in problem.sites[1].candidates]
    assert slow.operations not in found
    assert len(found) == len(sites[1]) - 1
