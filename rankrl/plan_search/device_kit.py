"""What a budget in time needs of another device: the files to time there, and whole networks' times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from decomposition import Budget, CandidateSet, CompressionPlan, LatencyTable, plan_from_choices
from decomposition.choose.reachable import least_fraction
from rankrl.kits.kit_writer import KitWriter, NamedFile, WrittenKit
from rankrl.kits.times_file import TimesFile
from rankrl.networks.base import PricedNetwork
from rankrl.operations import KeepChannels
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.timing.correction import Trial
from rankrl.timing.network_timer import NetworkTimer

_SHARES = (0.05, 0.15, 0.35, 0.6)
"""Where mixed plans are tried on the way from the smallest network to the dense one, in bytes."""
_OF_ONE_KIND = 2
"""Plans in floating point alone, and as many in integers alone."""


class DeviceKit:
    """All that a search in a network times, for another device.

    Whole networks are among it, under random plans: there is no time yet that could choose them.

    Args:
        network: The network.
        sites: The candidates of its layers, fitted or not.
        timer: Knows the network's files.
    """

    def __init__(self, network: PricedNetwork, sites: Sequence[CandidateSet], timer: NetworkTimer) -> None:
        self.network, self.sites, self._timer = network, sites, timer

    def write(self, folder: Path) -> WrittenKit:
        """Write the files that are timed in a search into a folder, with programs that time them.

        Raises:
            ExportError: A layer or a network cannot be written.
        """
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
        """Return the whole networks that were timed on the device and run there.

        Args:
            table: The times of the layers.

        Raises:
            ConfigError: The table of the device lacks them.
        """
        timer, options = self._timer, self._timer.options
        assert options.table is not None
        group = timer.networks([None, *map(self._plan, self._choices.values())])
        times = TimesFile.load(options.table).times(group)
        choices = [[site.dense for site in self.sites], *self._choices.values()]
        return [
            Trial.of(
                table,
                self.sites,
                [site.candidates[j] for site, j in zip(self.sites, each, strict=True)],
                float(time / times[0]),
            )
            for each, time in zip(choices, times, strict=True)
            if np.isfinite(time)
        ]

    def _plan(self, choices: Sequence[int]) -> CompressionPlan:
        network = self.network
        return plan_from_choices(
            self.sites, choices, network.specs, network.input_shape, "a trial", keep=KeepChannels
        )

    @cached_property
    def _choices(self) -> dict[str, list[int]]:
        """The plans by their titles: all in integers, and random ones of one arithmetic or of both."""
        generator, choices = np.random.default_rng(0), dict[str, list[int]]()
        if any(candidate.computes_integers for site in self.sites for candidate in site.candidates):
            choices["all int8"] = self._timer.all_in_integers(self.sites)
        for title, integer in (("floats", False), ("integers", True)):
            for number in range(_OF_ONE_KIND if not integer or choices else 0):
                choices[f"{title} {number + 1}"] = [_of_kind(site, integer, generator) for site in self.sites]
        total = self.network.costs["bytes"]
        least = least_fraction(self.sites, Budget.of_total(total, self.sites, "bytes", 1.0))
        for number, share in enumerate(_SHARES):
            budget = Budget.of_total(total, self.sites, "bytes", min(1.0, least + share * (1 - least) + 1e-9))
            choices[f"mixed {number + 1}"] = spend_at_random(self.sites, budget, generator).tolist()
        return choices


def _of_kind(site: CandidateSet, integer: bool, generator: np.random.Generator) -> int:
    """Draw a candidate that computes in integers, or one that does not; the dense one where there is none."""
    of_kind = [
        index
        for index, candidate in enumerate(site.candidates)
        if candidate.integer == integer and candidate.removed is None and candidate.reads is None
    ]
    return int(generator.choice(of_kind)) if of_kind else site.dense
