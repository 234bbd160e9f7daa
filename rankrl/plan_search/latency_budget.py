"""Set and keep latency budgets by timed layers, timed whole networks, and kits for other devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from decomposition import (
    Budget,
    CandidateSet,
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    LatencyTable,
    LayerPlan,
    allocate,
    plan_from_choices,
)
from decomposition.cache import Cache, digest
from decomposition.choose.allocation import expected_loss, least_fraction, least_within
from decomposition.plan.plan import fingerprint
from rankrl.errors import ConfigError
from rankrl.kits.kit import KitWriter, NamedFile, TimedNetwork, TimesFile, WrittenKit
from rankrl.networks.network import PricedNetwork
from rankrl.operations import KeepChannels
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.measured_plans import ALL_INT8, spent, uniform_plans, without_most_sensitive
from rankrl.plan_search.run import TimeEstimate
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.timing.correction import Trial, corrected, correction
from rankrl.timing.latency import SMALLEST_CHANGE, RelativeTime
from rankrl.timing.network_timer import NetworkTimer, operations_of

log = logging.getLogger(__name__)

_SHARES = (0.05, 0.15, 0.35, 0.6)
"""Where mixed plans are tried on the way from the smallest network to the dense one, in bytes."""
_UNIFORM = 0.5
"""Share of its multiply-accumulates that every layer keeps in plans of one format."""


class DeviceKit:
    """The files that a search times, layers and whole networks, for timing on another device.

    The whole networks follow uniform and random plans, since no times exist yet that could choose others.
    """

    def __init__(self, network: PricedNetwork, sites: Sequence[CandidateSet], timer: NetworkTimer) -> None:
        self.network, self.sites, self._timer = network, sites, timer

    def write(self, folder: Path) -> WrittenKit:
        """Write the files that a search times into a folder, with programs that time them."""
        timer = self._timer
        kit = KitWriter(folder, timer.about(self.sites), threads=timer.options.threads)
        group = timer.networks([None, *map(self._plan, self._choices.values())])
        kit.times(group)
        timer.table(self.sites, kit, "")
        networks: dict[str, NamedFile] = {}  # two titles may stand for one plan
        for name, title in zip(group.names, ["dense", *self._choices], strict=True):
            networks.setdefault(name, NamedFile(name, title))
        return kit.finish(list(networks.values()))

    def trials(self, table: LatencyTable) -> list[Trial]:
        """Return the whole networks that were timed on the device and run there."""
        group = self._timer.networks([None, *map(self._plan, self._choices.values())])
        times = self._tables[0].times(group)
        return [
            self._trial(table, choices, time / times[0])
            for choices, time in zip([self._dense, *self._choices.values()], times, strict=True)
            if np.isfinite(time)
        ]

    def later_trials(self, table: LatencyTable) -> list[Trial]:
        """Return the finished networks that were timed on the device, with the dense one."""
        trials = [
            self._trial(table, choices, network.share)
            for network in self.finished
            if network.plan is not None and (choices := self._choices_of(network.plan)) is not None
        ]
        return [self._trial(table, self._dense, 1.0), *trials] if trials else []

    @cached_property
    def finished(self) -> list[TimedNetwork]:
        """The finished networks that were timed on the device."""
        kit, *others = self._tables
        for other in others:
            other.check_device(kit)
            for network in other.networks:
                if network.plan is not None and network.plan.fingerprint != fingerprint(self.network.specs):
                    raise ConfigError(
                        f"timing.table={other.path}: {network.title!r} was made from another network; write "
                        "the kit of runs of this one (task=verify_kit)"
                    )
        return [network for other in others for network in other.networks]

    @cached_property
    def _tables(self) -> list[TimesFile]:
        return [TimesFile.load(path) for path in self._timer.options.tables]

    @property
    def _dense(self) -> list[int]:
        return [site.dense for site in self.sites]

    def _trial(self, table: LatencyTable, choices: Sequence[int], share: float) -> Trial:
        candidates = [site.candidates[j] for site, j in zip(self.sites, choices, strict=True)]
        return Trial.of(table, self.sites, candidates, float(share))

    def _choices_of(self, plan: CompressionPlan) -> list[int] | None:
        """Return the index of each site's candidate in a plan, None where one is not a candidate."""
        kept = {name: each.indices for name, each in plan.chosen(KeepChannels).items()}
        choices = []
        for site in self.sites:
            operations = tuple(
                each for each in plan[site.name].operations if not isinstance(each, KeepChannels)
            )
            pair = operations, None if site.producer is None else kept.get(site.producer)
            alike = [(candidate.operations, candidate.reads) for candidate in site.candidates]
            if pair not in alike:
                return None
            choices.append(alike.index(pair))
        return choices

    def _plan(self, choices: Sequence[int]) -> CompressionPlan:
        network = self.network
        return plan_from_choices(
            self.sites, choices, network.specs, network.input_shape, "a trial", keep=KeepChannels
        )

    @cached_property
    def _choices(self) -> dict[str, list[int]]:
        """The trial plans by title: all int8, uniform, and random ones."""
        generator, choices = np.random.default_rng(0), dict[str, list[int]]()
        if any(candidate.computes_integers for site in self.sites for candidate in site.candidates):
            choices[ALL_INT8] = self._timer.all_in_integers(self.sites)
        for title, plan in uniform_plans(self.sites, "macs", _UNIFORM).items():
            choices[title] = list(plan)
        total = self.network.costs["bytes"]
        least = least_fraction(self.sites, Budget.of_total(total, self.sites, "bytes", 1.0))
        # 1e-9 more than the least share: rounding must not leave a budget below the smallest plan.
        for number, share in enumerate(_SHARES):
            budget = Budget.of_total(total, self.sites, "bytes", min(1.0, least + share * (1 - least) + 1e-9))
            choices[f"mixed {number + 1}"] = spend_at_random(self.sites, budget, generator).tolist()
        return choices


_TRIED_SHARES = (0.15, 0.35, 0.6, 0.85)
"""Where plans are tried on the way from the fastest plan to the dense network."""
_ADJUSTMENTS = 9  # most greedy plans timed for one budget; each costs an export
# A greedy plan that takes at least this share of the time allowed leaves little unused.
_CLOSE = 0.95
# The next plan aims below the budget by the noise of a timing, and by a step more where it was tried before.
_SAFE, _STEP = 1 - SMALLEST_CHANGE, 1.02
_PLANS_TRIED = 20  # most plans of a search that are exported and timed
# Within timing noise: a plan slower than the budget by no more than this may keep it when timed again.
_NOISE_MARGIN = 1 + SMALLEST_CHANGE
_HALF_A_POINT = 0.005  # of score: what messages on budgets out of reach offer instead
# Sums of the same times differ in their last digits with the order of addition.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class TimedPlans:
    """The best plans that keep a budget in time."""

    keys: list[Choices]
    missed: str | None = None


@dataclass(frozen=True)
class _TimedPlan:
    """An exported and timed greedy plan."""

    time: RelativeTime
    loss: float
    budget: float
    table: LatencyTable


class LatencyBudget:
    """A latency budget of one network, kept by the times of its layers and of whole exported networks."""

    def __init__(
        self,
        network: PricedNetwork,
        sites: Sequence[CandidateSet],
        fraction: float,
        options: LatencyOptions,
        library: FitLibrary | None = None,
        *,
        counted: Mapping[str, float | None] | None = None,
    ) -> None:
        self.network, self.sites = network, list(sites)
        self.fraction, self.options = min(1.0, fraction / network.time_of_original), options
        fractions = network.fractions(counted or {})
        self.counted = {name: value for name, value in fractions.items() if value is not None}
        self._timer = network.timer(options, library)
        self.kit = DeviceKit(network, self.sites, self._timer)
        self._timed: dict[tuple[LayerPlan, ...], RelativeTime] = {}
        self.ratio = network.time_of_original  # users state and read fractions of the original's time

    @property
    def fraction_of_original(self) -> float:
        """The fraction that the user asked for."""
        return round(self.ratio * self.fraction, 6)

    def fit(self, fit: Callable[[Sequence[CandidateSet]], list[CandidateSet]]) -> None:
        """Fit the candidates that are faster than their dense layer; the others are left out."""
        table, sites = self._measured_sites
        self._measured_sites = table, fit(sites)

    def problem(self, library: FitLibrary) -> SearchProblem:
        """Return the search problem whose budget holds for greedy's plan when it is exported and timed.

        Times of layers do not quite add up: greedy's plan is timed as a whole, the table corrected by it,
        until a plan just keeps the fraction (cached, so that a resumed search has the same problem). On
        another device, where only its kit's networks were timed, the budget is kept with a margin.
        """
        table, _ = self._measured_sites
        key = self._key(table, self.fraction)

        def adjusted() -> dict[str, Any]:
            fraction, fitted = self._adjusted(table, library)
            return {"fraction": fraction, "table": fitted.to_dict()}

        if self.elsewhere:
            return self._estimated(self._corrected(table), library)
        kept = Cache(self.options.folder).value("budget", key, adjusted)
        return self._problem(LatencyTable.from_dict(kept["table"]), kept["fraction"], library)

    def unbounded(self, library: FitLibrary) -> SearchProblem:
        """Return the problem with the whole dense time as budget; whole networks calibrate its times."""
        return self._problem(self._corrected(self._measured_sites[0]), 1.0, library)

    def recosted(self, problem: SearchProblem, shares: Mapping[Choices, float]) -> SearchProblem:
        """Return a problem of `unbounded` with its times calibrated on those of plans, too."""
        table, measured = self._measured_sites
        contents = {site.name: [each.content() for each in site.candidates] for site in measured}
        sites = problem.sites
        kept = table.part(
            {
                site.name: [contents[site.name].index(each.content()) for each in site.candidates]
                for site in sites
            }
        )
        later = []
        for key, share in shares.items():
            candidates = [site.candidates[j] for site, j in zip(sites, key, strict=True)]
            later.append(Trial.of(kept, sites, candidates, share / self.ratio))
        fitted = corrected(kept, sites, correction(kept, self._trials(table), later))
        return replace(problem, sites=tuple(fitted.timed(sites)), budget=fitted.budget(1.0, sites))

    @property
    def elsewhere(self) -> bool:
        """Whether the times are those of another device, where plans can only be estimated, not timed."""
        return bool(self.options.tables)

    def estimate(self, problem: SearchProblem, choices: Sequence[int]) -> TimeEstimate | None:
        """Return the estimated time of a plan on another device; None if plans are timed on this one."""
        if not self.elsewhere:
            return None
        taken = operations_of(problem.plan(choices, ""))
        networks = tuple(
            {
                "title": each.title,
                "score": each.score,
                "milliseconds": each.milliseconds,
                "share": each.share,
                "taken": each.plan is not None and operations_of(each.plan) == taken,
            }
            for each in self.kit.finished
        )
        share = self.ratio * spent(problem, choices)
        return TimeEstimate(share, self._measured_sites[0].conditions, networks)

    def _estimated(self, table: LatencyTable, library: FitLibrary) -> SearchProblem:
        """Return the problem on another device; its budget is kept with a margin."""
        _, sites = self._measured_sites
        least = least_fraction(table.attach(sites), table.budget(1.0, sites))
        if least > self.fraction:
            raise self._unreachable("is estimated to take", least, table)
        return self._problem(table, max(_SAFE * self.fraction, min(1.0, least * _ROUNDING)), library)

    def _unreachable(self, takes: str, share: float, table: LatencyTable) -> DecompositionError:
        sites = table.attach(self._measured_sites[1])
        return DecompositionError(
            f"budget.latency={self.fraction_of_original} cannot be reached: the fastest plan {takes} "
            f"{self.ratio * share:.3f} of the dense network's time ({table.conditions})"
            f"{attainable(sites, table.budget(1.0, sites), self.ratio)}. Ask for that, or try another format"
        )

    def _corrected(self, table: LatencyTable) -> LatencyTable:
        """Calibrate the measured layer times on those of whole networks."""
        _, sites = self._measured_sites
        later = self.kit.later_trials(self._table()) if self.elsewhere else []
        return corrected(table, sites, correction(table, self._trials(table), later))

    def share_of_original(self, plan: CompressionPlan) -> RelativeTime:
        """Return the compressed network's time / the original's; a plan is timed once."""
        time = self._once(plan)
        return RelativeTime(self.ratio * time.share, self.ratio * time.width)

    def _adjusted(self, table: LatencyTable, library: FitLibrary) -> tuple[float, LatencyTable]:
        """Find a fraction and a corrected table with which greedy's plan keeps the budget."""
        _, sites = self._measured_sites
        first, later = self._trials(table), list[Trial]()
        tried: set[tuple[LayerPlan, ...]] = set()
        timed: list[_TimedPlan] = []
        scale, new = 1.0, False
        for _ in range(_ADJUSTMENTS):
            factors = correction(table, first, later)
            fitted = corrected(table, sites, factors)
            if new:
                last = later[-1]
                scale = _SAFE * float(np.dot(factors, last.parts)) / fitted.total / last.time
            elif timed:
                scale *= _STEP if timed[-1].time.keeps(self.fraction) else 1 / _STEP
            least = least_fraction(fitted.attach(sites), fitted.budget(1.0, sites))
            budget = min(1.0, max(scale * self.fraction, least * _ROUNDING))
            problem = self._problem(fitted, budget, library)
            plan = problem.plan(problem.preset, "greedy")
            choices = list(zip(problem.sites, problem.preset, strict=True))
            new = plan.layers not in tried
            time = self._once(plan).or_expected(spent(problem, problem.preset))
            if new:
                tried.add(plan.layers)
                later.append(Trial.of(table, sites, [site.candidates[j] for site, j in choices], time.share))
            fractions = (self.ratio * fraction for fraction in (self.fraction, budget, time.share))
            log.info("latency: %.3f asked, %.3f expected, %.3f measured", *fractions)
            loss = expected_loss(problem.sites, problem.preset)
            timed.append(_TimedPlan(time, loss, budget, fitted))
            keeps = time.keeps(self.fraction)
            at_an_end = budget == 1 if keeps else not new and budget <= least * _ROUNDING
            if at_an_end or (keeps and time.share >= self.fraction * _CLOSE):
                break
        best = self._best(timed)
        return best.budget, best.table

    def _best(self, timed: Sequence[_TimedPlan]) -> _TimedPlan:
        """Return the plan with the least loss among those that keep the budget with a margin.

        Where none does, the fastest one, if it misses the budget by no more than timing noise.
        """
        fastest = min(timed, key=lambda plan: plan.time.share)
        keeping = [plan for plan in timed if plan.time.keeps(self.fraction)]
        if not keeping and not fastest.time.misses(self.fraction * _NOISE_MARGIN):
            keeping = [fastest]
        if not keeping:
            raise self._unreachable("takes", fastest.time.share, fastest.table)
        return min(keeping, key=lambda plan: plan.loss)

    def _trials(self, table: LatencyTable) -> list[Trial]:
        """Return timed whole networks; none on this device where no layer computes in integers."""
        if self.elsewhere:
            return self.kit.trials(self._table())
        if not table.borders:
            return []
        specs, shape = self.network.specs, self.network.input_shape

        def measured(sites: Sequence[CandidateSet], choices: np.ndarray) -> float:
            plan = plan_from_choices(sites, choices, specs, shape, "a trial", keep=KeepChannels)
            return self._once(plan).share

        def trials() -> list[list[Any]]:
            _, sites = self._measured_sites
            return [[trial.parts, trial.time] for trial in first_trials(table, sites, measured)]

        kept = Cache(self.options.folder).value("trials", self._key(table), trials)
        return [Trial(tuple(parts), time) for parts, time in kept]

    def _once(self, plan: CompressionPlan) -> RelativeTime:
        """Time a plan once; a second timing would differ by noise alone."""
        if plan.layers not in self._timed:
            self._timed[plan.layers] = self.measured(plan)
        return self._timed[plan.layers]

    def measured(self, plan: CompressionPlan) -> RelativeTime:
        """Return the compressed network's time / the dense one's, timed in turns."""
        return self._timer.whole(plan)

    def timed_plans(
        self, problem: SearchProblem, keys: Sequence[Choices], count: int, *, folder: Path | None = None
    ) -> TimedPlans:
        """Export and time plans, the best first, until enough of them keep the budget with a margin.

        Where none does, the fastest is taken. For another device, only the search's estimates count.
        """
        tried = list(keys[: max(_PLANS_TRIED, count)])
        if self.elsewhere:
            return TimedPlans(tried[:count])

        def counting(plan: Choices, time: RelativeTime) -> RelativeTime:
            return time.or_expected(spent(problem, plan))

        def times() -> list[tuple[float, float]]:
            measured, keeping = list[RelativeTime](), 0
            for key in tried:
                measured.append(self._once(problem.plan(key, "a trial")))
                keeping += counting(key, measured[-1]).keeps(self.fraction)
                if keeping == count:
                    break
            return [(time.share, time.width) for time in measured]

        key = digest(problem.fingerprint, tried, self.fraction, count)
        known = [RelativeTime(*time) for time in Cache(folder).value("plan-times", key, times)]
        kept = [counting(plan, time) for plan, time in zip(tried, known, strict=False)]
        keeping = [plan for plan, time in zip(tried, kept, strict=False) if time.keeps(self.fraction)]
        if keeping:
            return TimedPlans(keeping)
        fastest = int(np.argmin([time.share for time in kept]))
        if not known[fastest].misses(self.fraction):
            return TimedPlans([tried[fastest]])
        assert problem.budget is not None
        return TimedPlans(
            [tried[fastest]],
            f"budget.latency={self.fraction_of_original} is missed: {_none_of(len(tried))} that fast when it "
            f"is exported. The fastest was taken; it keeps {self.ratio * known[fastest].share:.3f} of the "
            f"dense network's time{attainable(problem.sites, problem.budget, self.ratio)}. Ask for a little "
            "less, measure on a quiet machine, or raise search.episodes",
        )

    def _key(self, table: LatencyTable, *others: object) -> str:
        """Return the cache key of results that depend on a table, the candidates and all budgets."""
        _, sites = self._measured_sites
        candidates = [([candidate.content() for candidate in site.candidates], site.losses) for site in sites]
        return digest(table, candidates, self.counted, self._timer.conditions, others)

    @cached_property
    def _measured_sites(self) -> tuple[LatencyTable, list[CandidateSet]]:
        """The measured times and the sites, without candidates slower than their dense layer."""
        return self._table().without_slower(self.sites)

    def _table(self) -> LatencyTable:
        """Time all candidates of all sites, or read the cached table."""
        return self._timer.layers(self.sites)

    def _problem(self, table: LatencyTable, fraction: float, library: FitLibrary | None) -> SearchProblem:
        """Return the problem with the counted budgets and this fraction of the network's time."""
        network = self.network
        return SearchProblem.from_costs(
            network.specs,
            self._measured_sites[1],
            network.input_shape,
            network.costs,
            {**self.counted, "latency": fraction},
            latencies=table,
            library=library,
            preparation=network.preparation,
        )


def first_trials(
    table: LatencyTable,
    sites: Sequence[CandidateSet],
    measured: Callable[[Sequence[CandidateSet], np.ndarray], float],
) -> list[Trial]:
    """Time a greedy and a random plan within each of several budgets."""
    attached = table.attach(sites)
    least = least_fraction(attached, table.budget(1.0, sites))
    generator = np.random.default_rng(0)
    plans = []
    # 1e-9 more than the least share: rounding must not leave a budget below the fastest plan.
    for share in _TRIED_SHARES:
        budget = table.budget(min(1.0, least + share * max(0.0, 1 - least) + 1e-9), sites)
        plans += [allocate(attached, budget), spend_at_random(attached, budget, generator)]
    trials = [Trial.of(table, sites, [site.candidates[site.dense] for site in attached], 1.0)]
    for plan in plans:
        candidates = [site.candidates[index] for site, index in zip(attached, plan, strict=True)]
        trials.append(Trial.of(table, sites, candidates, measured(attached, plan)))
    return trials


def attainable(sites: Sequence[CandidateSet], budget: Budget, ratio: float) -> str:
    """Say how long integers alone, and the fastest plan within half a point of loss, should take."""
    shares = dict[str, float]()
    integers = without_most_sensitive(sites, 0)
    if any(choice != site.dense for choice, site in zip(integers, sites, strict=True)):
        shares["all layers in integers"] = budget.spent(sites, integers) / budget.total
    if (share := least_within(sites, budget, _HALF_A_POINT)) < 1:
        shares[f"a loss of half a point (budget.drop={_HALF_A_POINT})"] = share
    said = [f"{ratio * share:.3f} for {what}" for what, share in shares.items()]
    return f"; expected are {' and '.join(said)}" if said else ""


def _none_of(plans: int) -> str:
    return "the only plan is not" if plans == 1 else f"of the {plans} best plans none is"
