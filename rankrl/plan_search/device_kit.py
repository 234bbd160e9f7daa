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

_SHARES = (0.05, 0.15, 0.35, 0.6, 0.05, 0.15, 0.35, 0.85)
"""Where plans are tried on the way from the smallest network to the dense one."""


class DeviceKit:
    """All that a search in a network times, for another device.

    Whole networks under random plans are among it, which no time chooses: there is none yet.

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
        integers, trials = timer.in_integers(self.sites), list(map(self._plan, self._choices))
        group = timer.networks([None, *integers, *trials])
        kit.times(group)
        timer.table(self.sites, kit, "")
        titles: dict[str, str] = {}  # two plans may be one
        for name, title in zip(group.names, ["dense", *("all int8" for _ in integers)], strict=False):
            titles[name] = title
        for name in group.names:
            titles.setdefault(name, f"random {len(titles) - len(integers)}")
        return kit.finish([NamedFile(name, title) for name, title in titles.items()])

    def trials(self, table: LatencyTable) -> list[Trial]:
        """Return the whole networks that were timed on the device and run there.

        Args:
            table: The times of the layers.

        Raises:
            ConfigError: The table of the device lacks them.
        """
        timer, options = self._timer, self._timer.options
        assert options.table is not None
        group = timer.networks([None, *map(self._plan, self._choices)])
        times = TimesFile.load(options.table).times(group)
        choices = [[site.dense for site in self.sites], *self._choices]
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
    def _choices(self) -> list[list[int]]:
        """Random plans within several budgets in bytes, so that formats and precisions are mixed."""
        total, generator = self.network.costs["bytes"], np.random.default_rng(0)
        least = least_fraction(self.sites, Budget.of_total(total, self.sites, "bytes", 1.0))
        budgets = [
            Budget.of_total(total, self.sites, "bytes", min(1.0, least + share * (1 - least) + 1e-9))
            for share in _SHARES
        ]
        return [spend_at_random(self.sites, budget, generator).tolist() for budget in budgets]
