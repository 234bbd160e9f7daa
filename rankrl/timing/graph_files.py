"""Files to time of a network in an ONNX file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from decomposition import CompressionPlan, FitLibrary
from decomposition.cache import Cache, digest
from rankrl.onnx.graph.file import write_graph
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.refit import structured_graph
from rankrl.onnx.graph.site import Site
from rankrl.options.timing import LatencyOptions
from rankrl.timing.latency import LatencyComparison, compare_latency
from rankrl.timing.lone_node import LoneNode
from rankrl.timing.passes import measuring_conditions


@dataclass(frozen=True, eq=False)
class GraphFiles:
    """A network in an ONNX file as it is written; a `TimedFiles`."""

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
    """Return the time of a network / that of the one it was rewritten from, measured once."""

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
    """Return the padding, the same on both sides, with which a layer costs as much as the node."""
    if site.spec.kind == "linear":
        return ()
    return tuple(
        (before + after + 1) // 2
        for before, after in site.widths(site.spec.input_sizes[0][-len(site.spec.kernel_size) :])
    )
