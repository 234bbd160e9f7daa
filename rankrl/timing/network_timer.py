"""Write whole networks as files to be timed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from decomposition import (
    CandidateSet,
    CompressionPlan,
    FitLibrary,
    LatencyTable,
    LayerSpec,
    build_structure,
    factorised_layers,
    plan_from_choices,
)
from decomposition.cache import Cache, digest
from decomposition.network.inputs import InputShape
from decomposition.progress import progress_bar
from rankrl.data import Preprocessing
from rankrl.kits.kit import Contents, FileGroup, Stopwatch, TimesFile
from rankrl.onnx.export import export_network
from rankrl.onnx.export.tracing import random_feed
from rankrl.onnx.graph.compressed import structured_graph, write_graph
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import LatencyOptions
from rankrl.timing.latency import (
    LatencyComparison,
    LocalStopwatch,
    RelativeTime,
    compare_latency,
    measuring_conditions,
)
from rankrl.timing.layer_latency import LayerTimer, LoneNode, geometry, time_sites


@dataclass(frozen=True, eq=False)
class GraphFiles:
    """Writes a network in an ONNX file under plans; a `TimedFiles`."""

    prepared: PreparedFile
    feed: Feed
    library: FitLibrary

    channel_block = 1

    @property
    def modules(self) -> Mapping[str, nn.Module | LoneNode]:
        """The nodes by name: as modules, and LSTMs as they are."""
        network = self.prepared.network
        return {
            site.name: LoneNode(network, site, self.feed) if site.hidden else site.module(_padding(site))
            for site in self.prepared.changing
        }

    @property
    def conditions(self) -> str:
        """The whole graph."""
        return self.prepared.network.digest

    def write(self, path: Path, plan: CompressionPlan | None) -> None:
        """Write the graph as it is, or under a plan with the fits of its search."""
        if plan is None:
            self.prepared.network.as_in_file().save(path)
            return
        graph = structured_graph(self.prepared.network, self.prepared.sites, plan, self.library)
        self.library.make_room()
        write_graph(graph, path, [self.feed], fitted=False)


def relative_time(original: OnnxNetwork, network: OnnxNetwork, feed: Feed, options: LatencyOptions) -> float:
    """Return the time of a network / that of the network before rewriting, measured once."""

    def measured() -> float:
        with tempfile.TemporaryDirectory() as scratch:
            rewritten = Path(scratch) / "rewritten.onnx"
            network.as_in_file().save(rewritten)
            return 1 / compared_with_original(original, rewritten, feed, options).ratio

    conditions = measuring_conditions(original.axes.size(feed), options.threads, options.runtime)
    key = digest(conditions, original.digest, network.digest)
    return Cache(options.folder).value("rewritten", key, measured)


def compared_with_original(
    network: OnnxNetwork, path: Path, feed: Feed, options: LatencyOptions
) -> LatencyComparison:
    """Time a file and the network that it was made from, on the same inputs, in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "original.onnx"
        network.as_in_file().save(original)
        timing = options.timing | {"batch": network.axes.size(feed)}
        return compare_latency(original, path, **timing, inputs=feed)


def _padding(site: Site) -> tuple[int, ...]:
    """Return the symmetric padding with which a layer costs as much as the node."""
    if site.spec.kind == "linear":
        return ()
    return tuple(
        (before + after + 1) // 2
        for before, after in site.widths(site.spec.input_sizes[0][-len(site.spec.kernel_size) :])
    )


@dataclass(eq=False)
class ModuleFiles:
    """Exports a PyTorch module under plans; a `TimedFiles`."""

    model: nn.Module
    input_shape: InputShape
    batch: int
    channel_block: int = 1
    preprocessing: Preprocessing | None = None

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """All modules by name, the dense layers among them."""
        return dict(self.model.named_modules())

    @cached_property
    def feed(self) -> Batch:
        """Random inputs."""
        images = self.preprocessing
        if images is None:
            return random_feed(self.model, self.input_shape, self.batch)
        size = (self.batch, images.height, images.width, images.channels)
        return np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)

    @property
    def conditions(self) -> object:
        """The preprocessing; computations of the module between its layers make no difference."""
        return self.preprocessing

    def write(self, path: Path, plan: CompressionPlan | None) -> None:
        """Export the network under a plan, its factors random, or as it is."""
        model = self.model if plan is None else build_structure(self.model, plan)
        if plan is not None:
            for layer in factorised_layers(model).values():
                for parameter in layer.parameters():
                    nn.init.normal_(parameter, std=0.1)
        export_network(
            model,
            path,
            self.input_shape,
            [self.feed],
            preprocessing=self.preprocessing,
            channel_block=self.channel_block,
        )


_METHOD = 10
"""Version of the way layers are timed; tables of another version are not read."""


_ENOUGH_OF_A_PLAN = 400.0
"""Milliseconds of passes after which a round of a plan's timing ends."""


class TimedFiles(Protocol):
    """Writes the files of a network under plans, to be timed."""

    channel_block: int

    @property
    def modules(self) -> Mapping[str, nn.Module | LoneNode]:
        """The dense layers by name, as modules of the same cost, or as nodes of a file."""

    @property
    def feed(self) -> Batch:
        """Batch on which they are timed."""

    @property
    def conditions(self) -> object:
        """Everything besides options and layers on which times depend, as part of a key (`digest`)."""

    def write(self, path: Path, plan: CompressionPlan | None) -> None:
        """Write the network under a plan, or as it is; weights do not matter, so nothing is refitted."""


class NetworkTimer:
    """Measures a network's layers, and the whole network under a plan."""

    def __init__(
        self, files: TimedFiles, specs: Sequence[LayerSpec], input_shape: InputShape, options: LatencyOptions
    ) -> None:
        self.files, self.options = files, options
        self._specs, self._input_shape = specs, input_shape
        self._scratch = tempfile.TemporaryDirectory()

    @property
    def conditions(self) -> object:
        """Everything besides options and layers on which times depend."""
        return self.files.conditions

    def about(self, sites: Sequence[CandidateSet]) -> dict[str, str]:
        """Describe the network and candidates of the files, for kits and their tables of times."""
        candidates = [
            (site.name, geometry(site), [candidate.content() for candidate in site.candidates])
            for site in sites
        ]
        return {
            "method": str(_METHOD),
            "network": digest(self.files.conditions, list(self._specs)),
            "candidates": digest(self.files.channel_block, candidates),
            "batch": str(self.options.batch),
        }

    def layers(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Return the times of all candidates and of the rest of the network, measured once and kept.

        Integers are scaled so that dense layers in integers add up to that network's time with the same rest.
        """
        options = self.options
        about = self.about(sites)
        if options.tables:
            times = TimesFile.load(options.tables[0])
            times.check(about, options.threads)
            return self.table(sites, times, times.conditions)
        key = digest(about, self._here, options.runs)
        kept = Cache(options.folder).value("layers", key, lambda: self.measured(sites).to_dict())
        return LatencyTable.from_dict(kept)

    @property
    def _here(self) -> str:
        options = self.options
        return measuring_conditions(options.batch, options.threads, options.runtime)

    def measured(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Measure the table that `layers` returns, on this machine."""
        return self.table(sites, LocalStopwatch(self.options.threads, self.options.runtime), self._here)

    def table(self, sites: Sequence[CandidateSet], stopwatch: Stopwatch, conditions: str) -> LatencyTable:
        """Return the table that `layers` returns, with the times of a stopwatch."""
        files = self.files
        timer = LayerTimer(**self.options.timing, channel_block=files.channel_block, stopwatch=stopwatch)
        with progress_bar("time layers", total=len(sites)) as bar:
            times = time_sites(timer, files.modules, sites, lambda _: bar.advance())
        plans = [None, *self.in_integers(sites)]
        whole, *in_integers = [float(stopwatch.times(self.networks([plan]))[0]) for plan in plans]
        return times.table(sites, whole, next(iter(in_integers), None), conditions)

    def networks(self, plans: Sequence[CompressionPlan | None]) -> FileGroup:
        """Return whole networks under plans, None for the dense one, to be timed."""
        options = self.options
        names = [
            digest("network", self.conditions, self._specs, options.batch, plan and operations_of(plan))
            for plan in plans
        ]

        def contents() -> Contents:
            return [load_model(self._file("timed", plan)) for plan in plans], self.files.feed

        return FileGroup(tuple(names), contents, 2 * options.runs, warm_up=3)

    def whole(self, plan: CompressionPlan) -> RelativeTime:
        """Return the time of the network under a plan / that of the dense one, timed in turns."""
        path = self._file("compressed", plan)
        timing = self.options.timing
        return compare_latency(
            self._dense, path, **timing, inputs=self.files.feed, enough=_ENOUGH_OF_A_PLAN
        ).share

    def in_integers(self, sites: Sequence[CandidateSet]) -> list[CompressionPlan]:
        """Return the plan under which all layers that can compute in integers, if any can."""
        if not any(candidate.computes_integers for site in sites for candidate in site.candidates):
            return []
        choices = self.all_in_integers(sites)
        return [plan_from_choices(sites, choices, self._specs, self._input_shape, "all in integers")]

    def all_in_integers(self, sites: Sequence[CandidateSet]) -> list[int]:
        """Return the candidate of every site that is the dense layer in integers, else the dense layer."""
        return [
            next((j for j, candidate in enumerate(site.candidates) if candidate.only_integers), site.dense)
            for site in sites
        ]

    @cached_property
    def _dense(self) -> Path:
        """File of the dense network, written once and compared with dozens of plans."""
        return self._file("dense", None)

    def _file(self, name: str, plan: CompressionPlan | None) -> Path:
        path = Path(self._scratch.name) / f"{name}.onnx"
        self.files.write(path, plan)
        return path


def operations_of(plan: CompressionPlan) -> list[object]:
    """Return the operations of every layer as plain values, for keys."""
    return [[each.to_dict() for each in layer.operations] for layer in plan]
