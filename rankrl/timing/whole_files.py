"""Write whole networks as files to be timed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import nn

from decomposition import CompressionPlan, FitLibrary, build_structure, factorised_layers
from decomposition.cache import Cache, digest
from decomposition.network.inputs import InputShape
from rankrl.data import Preprocessing
from rankrl.onnx.export import export_network
from rankrl.onnx.export.tracing import random_feed
from rankrl.onnx.graph.file import write_graph
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.node_layers import Site
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.refit import structured_graph
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import LatencyOptions
from rankrl.timing.latency import LatencyComparison, compare_latency, measuring_conditions
from rankrl.timing.lone_node import LoneNode


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
