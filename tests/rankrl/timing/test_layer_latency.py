"""Latency tables of layers are complete, cached, and lead to plans that keep a budget in time."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from decomposition import (
    CandidateSet,
    CompressionPlan,
    DecompositionError,
    Factorise,
    FitLibrary,
    FitOptions,
    LatencyTable,
    LayerSpec,
    compressible_layers,
    make_plan,
    plan_from_choices,
)
from rankrl.data import Preprocessing
from rankrl.errors import ConfigError
from rankrl.kits.kit import FileGroup
from rankrl.networks.module import ModuleNetwork
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.bounded_loss import within
from rankrl.plan_search.latency_budget import LatencyBudget, TimedPlans
from rankrl.plan_search.measured_plans import PlanMeter
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.timing import network_timer
from rankrl.timing import network_timer as whole_files
from rankrl.timing.latency import RelativeTime
from rankrl.timing.layer_latency import LayerTimer, SiteTimes
from rankrl.timing.network_timer import NetworkTimer

SHAPE = (3, 12, 12)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 4),
    ).eval()


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """A network that is exported in no time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()


def library_of(model: nn.Module, *formats: str) -> FitLibrary:
    return FitLibrary(model, compressible_layers(model, SHAPE), formats, options=FitOptions(iterations=0))


@pytest.fixture(scope="module")
def library(model: nn.Module) -> FitLibrary:
    return library_of(model, "tucker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latencies")


def measured_layers(model: nn.Module, sites: Sequence[CandidateSet], **options: Any) -> LatencyTable:
    return ModuleNetwork(model, SHAPE).timer(LatencyOptions(**options)).layers(sites)


@pytest.fixture(scope="module")
def table(model: nn.Module, library: FitLibrary, folder: Path) -> LatencyTable:
    return measured_layers(model, library.all_candidates(limit=2), batch=4, runs=3, folder=folder)


def test_every_candidate_of_every_layer_is_measured(library: FitLibrary, table: LatencyTable) -> None:
    sites = library.all_candidates(limit=2)
    assert set(table.sites) == {site.name for site in sites}
    assert all(len(table.sites[site.name]) == len(site) for site in sites)
    assert all(time > 0 for times in table.sites.values() for time in times)
    assert table.rest > 0
    assert "batch 4" in table.conditions
    assert "onnxruntime" in table.conditions


def test_a_table_is_measured_once(
    model: nn.Module,
    library: FitLibrary,
    table: LatencyTable,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this should have come from the file")

    monkeypatch.setattr(LayerTimer, "candidates", refuse)
    sites = library.all_candidates(limit=2)
    assert measured_layers(model, sites, batch=4, runs=3, folder=folder) == table
    with pytest.raises(AssertionError, match="come from the file"):
        measured_layers(model, sites, batch=5, runs=3, folder=folder)
    fewer = library.all_candidates(limit=1)
    with pytest.raises(AssertionError, match="come from the file"):
        measured_layers(model, fewer, batch=4, runs=3, folder=folder)


def test_of_two_runs_that_measure_at_once_both_search_with_the_first_table(
    model: nn.Module, library: FitLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = library.all_candidates(limit=1)
    options = LatencyOptions(folder=tmp_path)
    tables = [LatencyTable({"layer": (1.0, 2.0)}, rest=0.5), LatencyTable({"layer": (3.0, 4.0)}, rest=0.5)]

    def measured(timer: NetworkTimer, found: Sequence[CandidateSet]) -> LatencyTable:
        own = tables.pop()
        if tables:
            ModuleNetwork(model, SHAPE).timer(options).layers(found)  # the other run, meanwhile
        return own

    monkeypatch.setattr(NetworkTimer, "measured", measured)
    for _ in range(2):
        found = ModuleNetwork(model, SHAPE).timer(options).layers(sites)
        assert found.sites["layer"] == (1.0, 2.0)
    assert not tables


def test_what_layers_of_one_geometry_have_in_common_is_timed_once(
    model: nn.Module, library: FitLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (library.all_candidates(limit=3)[index] for index in (1, 2))
    own = second.candidates[0]
    sites = [
        first.subset([0, first.dense]),
        replace(second, candidates=(*first.candidates[:2], own, second.candidates[-1])),
    ]
    timed: list[str] = []

    def candidates(timer: LayerTimer, dense: nn.Module, spec: LayerSpec, chosen: Sequence[Any]) -> np.ndarray:
        timed.extend(str(each) for each in chosen)
        return np.arange(1.0, 1 + len(chosen))

    monkeypatch.setattr(LayerTimer, "candidates", candidates)
    table = measured_layers(model, sites, batch=2, runs=2)
    contents = {str(each.operations) for site in sites for each in site.candidates}
    assert len(timed) == len(contents)
    assert [len(table.sites[site.name]) for site in sites] == [2, 4]
    times = {
        (site.name, str(each.operations)): time
        for site in sites
        for each, time in zip(site.candidates, table.sites[site.name], strict=True)
    }
    for each in sites[0].candidates:
        assert times[sites[0].name, str(each.operations)] == times[sites[1].name, str(each.operations)]


def test_dense_network_is_exported_once_for_all_plans(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[nn.Module] = []
    really = whole_files.export_network

    def export(network: nn.Module, *arguments: Any, **options: Any) -> Any:
        exported.append(network)
        return really(network, *arguments, **options)

    monkeypatch.setattr(whole_files, "export_network", export)
    sites = library_of(small, "tucker").all_candidates(limit=2)
    budget = LatencyBudget(ModuleNetwork(small, SHAPE), sites, 0.9, LatencyOptions(batch=2, runs=2))
    specs = compressible_layers(small, SHAPE)
    for choice in (0, 1):
        plan = plan_from_choices(sites, [choice] * len(sites), specs, SHAPE, "a test")
        assert budget.measured(plan).share > 0
    assert [network is small for network in exported].count(True) == 1
    assert len(exported) == 3


def test_candidates_of_several_formats_are_timed_beside_one_another(small: nn.Module) -> None:
    sites = library_of(small, "tucker", "cp").all_candidates(limit=1)
    sites = [site for site in sites if site.name == "2"]
    table = measured_layers(small, sites, batch=2, runs=2)
    assert {name: len(times) for name, times in table.sites.items()} == {"2": 3}
    problem = SearchProblem.from_model(small, sites, SHAPE, latency=1.0, latencies=table)
    assert problem.measure == "latency"
    assert problem.keeps_budget([each.dense for each in problem.sites])


def test_every_plan_of_the_problem_keeps_the_budget(
    model: nn.Module, library: FitLibrary, table: LatencyTable
) -> None:
    sites = library.all_candidates(limit=2)
    problem = SearchProblem.from_model(model, sites, SHAPE, latency=0.7, latencies=table, library=library)
    assert problem.measure == "latency"
    time = problem.cost(problem.preset).time
    assert time is not None
    assert time <= 0.7 * table.total
    assert problem.keeps_budget(problem.preset)
    dense = [site.dense for site in problem.sites]
    assert problem.cost(dense).time == pytest.approx(table.total)
    assert not problem.keeps_budget(dense)
    for site in problem.sites:
        assert all(site.cost("latency")[:-1] < site.cost("latency")[-1])


@pytest.mark.parametrize(("whole", "in_integers"), [(10.0, 7.0), (6.0, 5.0)])
def test_layers_in_integers_add_up_beside_those_that_stay_in_floats(whole: float, in_integers: float) -> None:
    times = SiteTimes({"both": (1.0, 2.0, 6.0), "floats": (1.0, 3.0)}, {}, {})
    sites = [_site("both", False, True, False), _site("floats", False, False)]
    table = times.table(sites, whole, in_integers)
    floats = table.sites["floats"][-1] + table.rest
    assert table.sites["both"][-1] + floats == pytest.approx(whole)
    assert table.sites["both"][1] + floats == pytest.approx(in_integers)


def test_a_network_that_is_faster_in_integers_than_its_floats_alone_leaves_times_as_measured() -> None:
    sites = [_site("both", False, True, False), _site("floats", False, False)]
    table = SiteTimes({"both": (1.0, 2.0, 6.0), "floats": (1.0, 3.0)}, {}, {}).table(sites, 10.0, 2.0)
    assert table.sites["both"] == (1.0, 2.0, 6.0)


def _site(name: str, *integers: bool) -> Any:
    """Make a site whose candidates are dense or not, in integers or not."""
    candidates = [types.SimpleNamespace(computes_integers=each, only_integers=each) for each in integers]
    return types.SimpleNamespace(name=name, candidates=candidates)


@pytest.mark.slow
def test_a_whole_network_is_measured(model: nn.Module, library: FitLibrary, folder: Path) -> None:
    options = LatencyOptions(batch=4, runs=3, folder=folder)
    budget = LatencyBudget(ModuleNetwork(model, SHAPE), library.all_candidates(limit=3), 0.95, options)
    problem = budget.problem(library)
    measured = budget.measured(problem.plan(problem.preset, "greedy"))
    assert measured.share > 0  # how much less than 1 is the machine's affair
    assert math.isfinite(measured.share)


@pytest.mark.parametrize("preprocess", [False, True])
def test_a_network_is_timed_in_the_form_in_which_it_is_exported(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch, preprocess: bool
) -> None:
    inputs = []

    def look(*paths: Path, **_: int) -> types.SimpleNamespace:
        inputs.extend(onnx.load(path).graph.input[0].type.tensor_type.elem_type for path in paths)
        return types.SimpleNamespace(share=RelativeTime(0.5))

    monkeypatch.setattr(network_timer, "compare_latency", look)
    how = Preprocessing(*SHAPE, mean=(0.5,) * 3, std=(0.2,) * 3)
    options = LatencyOptions(preprocess=preprocess)
    network = ModuleNetwork(small, SHAPE, preprocessing=how)
    budget = LatencyBudget(network, library_of(small, "tucker").all_candidates(limit=1), 0.8, options)
    assert budget.measured(make_plan(small, SHAPE, "tucker", 4)) == RelativeTime(0.5)
    assert inputs == 2 * [onnx.TensorProto.UINT8 if preprocess else onnx.TensorProto.FLOAT]


class Summing(LatencyBudget):
    """A machine where a layer takes its parameters in time, and a network `factor` times the sum of them."""

    factor, width = 1.0, 0.0
    measurements = 0

    def _table(self) -> LatencyTable:
        times = {site.name: tuple(map(float, site.params)) for site in self.sites}
        return LatencyTable(times, conditions="a test")

    def measured(self, plan: CompressionPlan) -> RelativeTime:
        self.measurements += 1
        dense = sum(site.spec.params for site in self.sites)
        kept = sum(plan[site.name].cost(site.spec).params for site in self.sites) / dense
        return RelativeTime(self.factor * kept, self.width)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.1])
def test_the_budget_is_adjusted_until_the_whole_network_keeps_it(
    model: nn.Module, library: FitLibrary, tmp_path: Path, factor: float
) -> None:
    budget = Summing(
        ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions(folder=tmp_path)
    )
    budget.factor = factor
    problem = budget.problem(library)
    assert 0.5 < budget.measured(problem.plan(problem.preset, "greedy")).share <= 0.6
    measurements = budget.measurements
    assert budget.problem(library).fingerprint == problem.fingerprint
    assert budget.measurements == measurements, "a resumed search must face the same problem"


class Heavier(Summing):
    """Such a machine where factorised layers take longer in a network than alone."""

    def measured(self, plan: CompressionPlan) -> RelativeTime:
        taken = [
            (1.3 if plan[site.name].operations else 1.0) * plan[site.name].cost(site.spec).params
            for site in self.sites
        ]
        return RelativeTime(sum(taken) / sum(site.spec.params for site in self.sites))


def test_measured_plans_correct_the_times_that_later_plans_are_made_by(
    model: nn.Module, library: FitLibrary, tmp_path: Path
) -> None:
    sites, options = library.all_candidates(limit=16), LatencyOptions(folder=tmp_path)
    budget = Heavier(ModuleNetwork(model, SHAPE), sites, 1.0, options)
    problem = budget.unbounded(library)
    recosted = partial(budget.recosted, problem)
    meter = PlanMeter(problem, lambda _: 0.0, budget.share_of_original, identity="a test", recosted=recosted)
    off = []
    for fraction in (0.3, 0.4, 0.5, 0.6):
        key = within(meter.problem, fraction).preset
        plan = meter(f"greedy at {fraction}", key)
        off.append(abs(plan.expected_cost / plan.cost - 1))
    assert off[0] > 0.1
    assert off[-1] < 0.1 * off[0]
    for before, after in zip(problem.sites, meter.problem.sites, strict=True):
        assert before.losses.tolist() == after.losses.tolist()


class Restless(Summing):
    """Such a machine with neighbours: the first network that is timed seems faster than the others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.timed: list[tuple[CompressionPlan, RelativeTime]] = []

    def measured(self, plan: CompressionPlan) -> RelativeTime:
        self.factor = 1.1 if self.measurements else 0.9
        self.timed.append((plan, super().measured(plan)))
        return self.timed[-1][1]

    def loss(self, plan: CompressionPlan) -> float:
        chosen = {
            site.name: [each.operations for each in site.candidates].index(plan[site.name].operations)
            for site in self.sites
        }
        return sum(float(site.losses[chosen[site.name]]) for site in self.sites)


def test_of_the_plans_that_keep_a_budget_on_a_restless_machine_the_best_is_taken(
    model: nn.Module, library: FitLibrary
) -> None:
    budget = Restless(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.65, LatencyOptions())
    problem = budget.problem(library)
    keeping = [budget.loss(plan) for plan, time in budget.timed if time.keeps(0.65)]
    assert len(set(keeping)) > 1, "several plans keep it"
    assert budget.loss(problem.plan(problem.preset, "greedy")) == pytest.approx(min(keeping))


def test_a_table_that_is_too_pessimistic_does_not_rule_a_budget_out(
    model: nn.Module, library: FitLibrary
) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.02, LatencyOptions())
    budget.factor = 0.02
    problem = budget.problem(library)
    assert budget.measured(problem.plan(problem.preset, "greedy")).share <= 0.02


def test_a_budget_that_the_whole_network_cannot_keep_is_refused_with_the_least(
    model: nn.Module, library: FitLibrary
) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.3, LatencyOptions())
    budget.factor = 30.0
    with pytest.raises(
        DecompositionError, match=r"budget\.latency=0\.3 cannot be reached: the fastest plan takes"
    ):
        budget.problem(library)


def test_senseless_budgets_in_time_are_refused(model: nn.Module, library: FitLibrary) -> None:
    sites = library.all_candidates(limit=3)
    with pytest.raises(ConfigError, match="needs measured latencies"):
        SearchProblem.from_model(model, sites, SHAPE, latency=0.5)
    with pytest.raises(ConfigError, match="needs measured latencies"):
        SearchProblem.from_model(model, sites, SHAPE, latency=0.5, params=0.5)
    problem = SearchProblem.from_model(model, sites, SHAPE, params=0.5)
    assert problem.cost(problem.preset).time is None


def test_the_best_plans_that_hold_are_found_in_order(model: nn.Module, library: FitLibrary) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    problem = budget.problem(library)
    keys = [
        tuple(0 if site.name != "0" else min(choice, site.dense) for site in problem.sites)
        for choice in (problem.sites[0].dense, 0, 1)
    ]
    for count in (1, 2, 5):
        assert budget.timed_plans(problem, keys, count) == TimedPlans(keys[:count])
    slow = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    slow.factor = 100.0
    timed = slow.timed_plans(problem, keys, 1)
    assert timed.keys == [min(keys, key=lambda key: problem.cost(key).params)], "the fastest is the nearest"
    assert timed.missed is not None
    assert timed.missed.startswith("budget.latency=0.6 is missed: of the 3 best plans none is that fast")


def test_a_plan_that_kept_its_budget_is_not_lost_by_a_second_timing(
    model: nn.Module, library: FitLibrary
) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    problem = budget.problem(library)
    choices = tuple(problem.preset.tolist())
    budget.factor, measurements = 1.5, budget.measurements
    assert budget.timed_plans(problem, [choices], 1) == TimedPlans([choices])
    assert budget.measurements == measurements
    another = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    another.factor = 1.5
    missed = another.timed_plans(problem, [choices], 1).missed
    assert missed is not None
    assert missed.startswith("budget.latency=0.6 is missed: the only plan is not that fast")


def test_a_resumed_search_comes_to_the_plan_that_kept_its_budget_before(
    model: nn.Module, library: FitLibrary, tmp_path: Path
) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    problem = budget.problem(library)
    choices = tuple(problem.preset.tolist())
    assert budget.timed_plans(problem, [choices], 1, folder=tmp_path) == TimedPlans([choices])
    resumed = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    resumed.factor = 1.5  # timed again, the plan would miss the budget
    assert resumed.timed_plans(problem, [choices], 1, folder=tmp_path) == TimedPlans([choices])
    assert problem.budget is not None
    other = replace(problem, budget=replace(problem.budget, fraction=0.61))
    assert resumed.timed_plans(other, [choices], 1, folder=tmp_path).missed is not None, (
        "times of another problem"
    )


@pytest.mark.parametrize("width", [0.01, 0.05])
def test_plans_keep_a_budget_by_as_much_as_timings_differ(
    model: nn.Module, library: FitLibrary, width: float
) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    budget.width = width
    problem = budget.problem(library)
    assert 0.4 < budget.measured(problem.plan(problem.preset, "greedy")).share <= 0.6 - width


def test_times_that_are_too_unsure_choose_nothing(model: nn.Module, library: FitLibrary) -> None:
    budget = Summing(ModuleNetwork(model, SHAPE), library.all_candidates(limit=16), 0.6, LatencyOptions())
    budget.factor, budget.width = 1.3, 0.3  # a disturbed machine, which the interval tells
    problem = budget.problem(library)
    time = problem.cost(problem.preset).time
    assert time is not None
    assert problem.budget is not None
    assert 0.5 < time / problem.budget.total < 0.6, "as much is expected of greedy's plan as is allowed"
    dense, preset = tuple(site.dense for site in problem.sites), tuple(problem.preset.tolist())
    assert budget.timed_plans(problem, [dense, preset], 1) == TimedPlans([preset])
    assert budget.timed_plans(problem, [dense], 1).missed is not None, "its whole interval lies above 0.6"
    budget.width = 1.5
    budget._timed.clear()
    assert budget.timed_plans(problem, [dense], 1).missed is None


class Drawn(Summing):
    """A busy machine: two timings of one network differ by up to 4 %, which the interval tells."""

    width = 0.04 * 0.6

    def __init__(self, *arguments: Any, seed: int) -> None:
        super().__init__(*arguments)
        self.random = np.random.default_rng(seed)

    def measured(self, plan: CompressionPlan) -> RelativeTime:
        self.factor = self.random.uniform(0.98, 1.02)
        return super().measured(plan)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_was_timed_on_a_busy_machine_keeps_its_budget_when_it_is_timed_again(
    model: nn.Module, library: FitLibrary, seed: int, tmp_path: Path
) -> None:
    def begun(seed: int) -> Drawn:
        network, options = ModuleNetwork(model, SHAPE), LatencyOptions(folder=tmp_path)
        return Drawn(network, library.all_candidates(limit=16), 0.6, options, seed=seed)

    budget = begun(seed)
    problem = budget.problem(library)
    dense = [site.dense for site in problem.sites]
    larger = [np.minimum(problem.preset + more, dense) for more in reversed(range(4))]
    keys = [tuple(map(int, choices)) for choices in larger]
    timed = budget.timed_plans(problem, keys, 1, folder=tmp_path)
    assert timed.missed is None
    plan = problem.plan(timed.keys[0], "test")
    assert all(budget.measured(plan).share <= 0.6 for _ in range(20))
    again = begun(seed + 100)
    assert again.problem(library).fingerprint == problem.fingerprint
    assert again.timed_plans(problem, keys, 1, folder=tmp_path) == timed


@pytest.mark.parametrize(("factor", "refused"), [(1.02, False), (1.05, True)])
def test_a_budget_that_is_missed_by_a_hair_is_searched_all_the_same(
    model: nn.Module, library: FitLibrary, tmp_path: Path, factor: float, refused: bool
) -> None:
    sites = library.all_candidates(limit=16)
    least = sum(site.params.min() for site in sites) / sum(site.spec.params for site in sites)
    budget = Summing(ModuleNetwork(model, SHAPE), sites, float(least), LatencyOptions(folder=tmp_path))
    budget.factor = factor
    if refused:
        with pytest.raises(DecompositionError, match="cannot be reached"):
            budget.problem(library)
    else:
        problem = budget.problem(library)
        assert problem.cost(problem.preset).params == sum(site.params.min() for site in sites)
        budget.factor = 2.0
        assert budget.problem(library).fingerprint == problem.fingerprint, "what was found is kept"


@pytest.mark.parametrize(("left", "expected"), [(None, [4]), (2**40, [4]), (1_500_000, [2, 2]), (0, [1] * 4)])
def test_no_more_graphs_are_made_together_than_there_is_room_for(
    left: int | None, expected: list[int], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []

    class Watch:
        def times(self, group: FileGroup) -> np.ndarray:
            groups.append(len(group.names))
            return np.arange(3.0, 3 + len(group.names))

    monkeypatch.setattr("rankrl.timing.layer_latency.room", lambda: left)
    timer, spec = (
        LayerTimer(batch=2, threads=1, runs=1, stopwatch=Watch()),
        compressible_layers(model, SHAPE)[1],
    )
    operations = [(), *((Factorise("tucker", (rank, rank)),) for rank in (4, 8, 16))]
    times = timer.candidates(model[2], spec, operations)
    assert groups[1:] == expected  # before them the neighbours
    assert len(times) == 4
