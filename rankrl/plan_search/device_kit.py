"""What a budget in time needs of another device: the files to time there, and whole networks' times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from decomposition import Budget, CandidateSet, CompressionPlan, LatencyTable, plan_from_choices
from decomposition.choose.allocation import least_fraction
from decomposition.plan.plan import fingerprint
from rankrl.errors import ConfigError
from rankrl.kits.kit_writer import KitWriter, NamedFile, WrittenKit
from rankrl.kits.times_file import TimedNetwork, TimesFile
from rankrl.networks.base import PricedNetwork
from rankrl.operations import KeepChannels
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.plan_search.standard_plans import ALL_INT8, uniform_plans
from rankrl.timing.correction import Trial
from rankrl.timing.network_timer import NetworkTimer

_SHARES = (0.05, 0.15, 0.35, 0.6)
"""Where mixed plans are tried on the way from the smallest network to the dense one, in bytes."""
_UNIFORM = 0.5
"""Share of its multiply-accumulates that every layer keeps in plans of one format."""


class DeviceKit:
    """All that a search in a network times, for another device.

    Whole networks are among it, under plans that anyone would write and random ones: there is no time yet
    that could choose them.
    """

    def __init__(self, network: PricedNetwork, sites: Sequence[CandidateSet], timer: NetworkTimer) -> None:
        self.network, self.sites, self._timer = network, sites, timer

    def write(self, folder: Path) -> WrittenKit:
        """Write the files that are timed in a search into a folder, with programs that time them."""
        timer = self._timer
        kit = KitWriter(folder, timer.about(self.sites), threads=timer.options.threads)
        group = timer.networks([None, *map(self._plan, self._choices.values())])
        kit.times(group)
        timer.table(self.sites, kit, "")
        networks: dict[str, NamedFile] = {}  # two plans may be one
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
        """Return the candidates that a plan is made of, None where one is not among them."""
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
        """The plans by their titles: those that anyone would write, and random ones."""
        generator, choices = np.random.default_rng(0), dict[str, list[int]]()
        if any(candidate.computes_integers for site in self.sites for candidate in site.candidates):
            choices[ALL_INT8] = self._timer.all_in_integers(self.sites)
        for title, plan in uniform_plans(self.sites, "macs", _UNIFORM).items():
            choices[title] = list(plan)
        total = self.network.costs["bytes"]
        least = least_fraction(self.sites, Budget.of_total(total, self.sites, "bytes", 1.0))
        for number, share in enumerate(_SHARES):
            budget = Budget.of_total(total, self.sites, "bytes", min(1.0, least + share * (1 - least) + 1e-9))
            choices[f"mixed {number + 1}"] = spend_at_random(self.sites, budget, generator).tolist()
        return choices
