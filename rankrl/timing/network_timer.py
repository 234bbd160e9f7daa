"""Times of a network: its layers one by one, and the whole network under a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import nn

from decomposition import CandidateSet, CompressionPlan, LatencyTable, LayerSpec, plan_from_choices
from decomposition.cache import Cache, digest
from decomposition.network.input_specs import InputShape
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import LatencyOptions
from rankrl.progress import progress_bar
from rankrl.timing.latency import RelativeTime, compare_latency, measure_latency
from rankrl.timing.layer_latency import geometry, time_sites
from rankrl.timing.layer_timing import LayerTimer
from rankrl.timing.lone_node import LoneNode
from rankrl.timing.passes import measuring_conditions

_METHOD = 7
"""Version of the way layers are timed; tables of another version are not read."""


class TimedFiles(Protocol):
    """Files to time of a network under plans.

    Attributes:
        channel_block: Channels are filled up to multiples of it in the files.
    """

    channel_block: int

    @property
    def modules(self) -> Mapping[str, nn.Module | LoneNode]:
        """The dense layers by name, as modules of the same cost, or as nodes of a file."""

    @property
    def feed(self) -> Batch:
        """The batch that they are timed on."""

    @property
    def conditions(self) -> object:
        """All that times depend on apart from the options and the layers, as part of a key (`digest`)."""

    def write(self, path: Path, plan: CompressionPlan | None) -> None:
        """Write the network under a plan, or as it is; weights do not matter, so nothing is refitted.

        Raises:
            ExportError: It cannot be written.
        """


class NetworkTimer:
    """Measures a network's layers, and the whole network under a plan.

    Args:
        files: Its files.
        specs: Its layers in forward order.
        input_shape: Shape of one input without the batch axis, or what else is known of the inputs.
        options: How time is measured; the batch is that of the files' feed.
    """

    def __init__(
        self, files: TimedFiles, specs: Sequence[LayerSpec], input_shape: InputShape, options: LatencyOptions
    ) -> None:
        self.files, self.options = files, options
        self._specs, self._input_shape = specs, input_shape
        self._scratch = tempfile.TemporaryDirectory()

    @property
    def conditions(self) -> object:
        """All that times depend on apart from the options and the layers."""
        return self.files.conditions

    def layers(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Return the times of all candidates of all sites, and of the whole dense network.

        The rest is the dense network's time without its layers. Where candidates compute in integers, their
        times are scaled so that, with the same rest, the dense layers in integers add up to the time of the
        dense network in integers. A table is measured once and kept.

        Args:
            sites: The candidates of the layers.

        Returns:
            Milliseconds for one batch.

        Raises:
            ExportError: A layer or the network cannot be written.
        """
        options = self.options
        key = digest(
            _METHOD,
            measuring_conditions(options.batch, options.threads, options.runtime),
            options.runs,
            self.files.channel_block,
            self.files.conditions,
            list(self._specs),
            [
                (site.name, geometry(site), [candidate.content() for candidate in site.candidates])
                for site in sites
            ],
        )
        cache = Cache(options.folder)
        return LatencyTable.from_dict(cache.value("layers", key, lambda: self.measured(sites).to_dict()))

    def measured(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Measure the table that `layers` returns."""
        options, files = self.options, self.files
        timer = LayerTimer(**options.timing, channel_block=files.channel_block)
        with progress_bar("time layers", total=len(sites)) as bar:
            times = time_sites(timer, files.modules, sites, lambda _: bar.advance())
        whole, in_integers = self._milliseconds(self._dense), None
        if any(candidate.computes_integers for site in sites for candidate in site.candidates):
            in_integers = self._milliseconds(self._file("integers", self._in_integers(sites)))
        conditions = measuring_conditions(options.batch, options.threads, options.runtime)
        return times.table(sites, whole, in_integers, conditions)

    def whole(self, plan: CompressionPlan) -> RelativeTime:
        """Return the time of the network under a plan / that of the dense one, timed in turns."""
        path = self._file("compressed", plan)
        return compare_latency(self._dense, path, **self.options.timing, inputs=self.files.feed).share

    def _in_integers(self, sites: Sequence[CandidateSet]) -> CompressionPlan:
        """Return the plan under which all layers that can compute in integers, and nothing else changes."""
        choices = [
            next((j for j, candidate in enumerate(site.candidates) if candidate.only_integers), site.dense)
            for site in sites
        ]
        return plan_from_choices(sites, choices, self._specs, self._input_shape, "all in integers")

    def _milliseconds(self, path: Path) -> float:
        twice = self.options.timing | {"runs": 2 * self.options.runs}
        return measure_latency(path, **twice, inputs=self.files.feed).median_ms

    @cached_property
    def _dense(self) -> Path:
        """The dense network's file, which dozens of plans are compared with."""
        return self._file("dense", None)

    def _file(self, name: str, plan: CompressionPlan | None) -> Path:
        path = Path(self._scratch.name) / f"{name}.onnx"
        self.files.write(path, plan)
        return path
