"""Times of a network in an ONNX file: its nodes alone, and the whole graph under a plan."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx

from decomposition import CandidateSet, CompressionPlan, FitLibrary, LatencyTable
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.graph.budget import compared_with_original
from rankrl.onnx.graph.file import write_graph
from rankrl.onnx.graph.given import GivenFile
from rankrl.onnx.graph.network import Feed
from rankrl.onnx.graph.refit import structured_graph
from rankrl.onnx.graph.site import Site
from rankrl.options.timing import LatencyOptions
from rankrl.progress import progress_bar
from rankrl.timing.latency import measure_latency
from rankrl.timing.layer_latency import kept_table, measuring_conditions, table_key, time_sites


class GraphTimer:
    """Measures the nodes of a network in an ONNX file, and the graph under a plan; a `Timer`.

    Args:
        given: The network.
        feed: The batch that is timed.
        options: How time is measured; the batch is that of `feed`.
        library: The fits of its nodes.
    """

    conditions = None

    def __init__(self, given: GivenFile, feed: Feed, options: LatencyOptions, library: FitLibrary) -> None:
        self.given, self.feed, self.options, self.library = given, feed, options, library
        self._batch = given.network.axes.size(feed)

    def layers(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Measure all candidates of all sites, or read what was measured before."""
        specs = {site.name: site.spec for site in self.given.sites}
        digest = hashlib.sha256(self.given.network.model.SerializeToString()).hexdigest()
        conditions = measuring_conditions(self._batch, self.options.threads)
        key = table_key(sites, specs, f"{conditions} {digest}", self.options.runs)
        return kept_table(self.options.folder, key, lambda: self._measured(sites, conditions))

    def whole(self, plan: CompressionPlan) -> float:
        """Return the time of the graph under a plan / that without one, timed in turns."""
        graph = structured_graph(self.given.network, self.given.sites, plan, self.library)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "compressed.onnx"
            write_graph(graph, path, [self.feed])
            return 1 / compared_with_original(self.given.network, path, self.feed, self.options).ratio

    def _measured(self, sites: Sequence[CandidateSet], conditions: str) -> LatencyTable:
        network, options = self.given.network, self.options
        integers = any(each.integer for site in sites for each in site.candidates)
        with progress_bar("time nodes", total=len(sites)) as bar, tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            times = time_sites(
                {
                    site.name: site.module(_padding(site))
                    for site in self.given.sites
                    if site.spec.refusal is None
                },
                sites,
                batch=self._batch,
                threads=options.threads,
                runs=options.runs,
                scratch=scratch,
                progress=lambda _: bar.advance(),
            )
            path = scratch / "network.onnx"
            onnx.save(network.as_in_file().model, path)
            whole = self._time(path)
            in_integers = None
            if integers:
                rounded = {site.name for site in sites if any(each.integer for each in site.candidates)}
                weights = [node.input[1] for node in network.model.graph.node if node.name in rounded]
                quantise_onnx(path, path, [self.feed], weights=weights, partly=True)
                in_integers = self._time(path)
        return times.table(sites, whole, in_integers, conditions)

    def _time(self, path: Path) -> float:
        options = self.options
        timed = measure_latency(
            path, batch=self._batch, threads=options.threads, runs=options.runs, inputs=self.feed
        )
        return timed.median_ms


def _padding(site: Site) -> tuple[int, ...]:
    """Return the padding, the same on both sides, with which a layer costs what the node does."""
    if site.spec.kind == "linear":
        return ()
    return tuple(
        (before + after + 1) // 2
        for before, after in site.widths(site.spec.input_sizes[0][-len(site.spec.kernel_size) :])
    )
