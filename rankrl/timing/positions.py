"""Find by timing the convolutions of a graph that are faster when they compute several positions at once."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from decomposition.cache import Cache, digest
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.node_layers import Site
from rankrl.onnx.graph.positions import (
    SeveralPositions,
    possible_positions,
    to_metadata,
    with_several_positions,
)
from rankrl.onnx.graph_edits import free_ends, part_of
from rankrl.options.timing import LatencyOptions
from rankrl.progress import progress_bar
from rankrl.timing.form import STEPS, fast_multiple
from rankrl.timing.latency import is_unchanged, measuring_conditions, time_in_turns
from rankrl.timing.whole_files import relative_time

log = logging.getLogger(__name__)

_RUNS = 9


def faster_positions(
    network: OnnxNetwork, sites: Sequence[Site], feed: Feed, options: LatencyOptions
) -> dict[str, SeveralPositions]:
    """Return the axis and number of positions of nodes that are faster when they compute several at once.

    Every node is timed alone in each of its ways, and then the network as a whole; the result is empty where
    that is no faster.
    """
    if not _ways(network, sites, max(STEPS)):
        return {}
    ways = _ways(network, sites, fast_multiple(options.folder, options.runtime))

    def measured() -> dict[str, dict[str, int]]:
        return to_metadata(_measured(network, sites, ways, feed, options))

    conditions = measuring_conditions(network.axes.size(feed), options.threads, options.runtime)
    key = digest(conditions, network.digest, ways)
    ways_kept = Cache(options.folder).value("positions", key, measured)
    return {name: SeveralPositions(**content) for name, content in ways_kept.items()}


def _measured(
    network: OnnxNetwork,
    sites: Sequence[Site],
    ways: Mapping[str, Sequence[SeveralPositions]],
    feed: Feed,
    options: LatencyOptions,
) -> dict[str, SeveralPositions]:
    positions: dict[str, SeveralPositions] = {}
    with progress_bar("time positions", total=len(ways)) as bar:
        for site in sites:
            if site.name in ways:
                best = _fastest(network, site, ways[site.name], network.axes.size(feed), options)
                positions |= {} if best is None else {site.name: best}
                bar.advance()
    if positions:
        time = relative_time(network, with_several_positions(network, sites, positions), feed, options)
        log.info("with them the network takes %.2f of its time", time)
        if time > 1 or is_unchanged(time):
            return {}
    return positions


def _ways(network: OnnxNetwork, sites: Sequence[Site], group: int) -> dict[str, list[SeveralPositions]]:
    """Return the ways in which nodes can compute several positions at once, for those that have any."""
    ways = {site.name: possible_positions(network, site, group) for site in sites}
    return {name: of_node for name, of_node in ways.items() if of_node}


def _fastest(
    network: OnnxNetwork, site: Site, ways: Sequence[SeveralPositions], batch: int, options: LatencyOptions
) -> SeveralPositions | None:
    """Time a node with all that share its weight; return its fastest way, None for one position at once."""
    times = np.zeros(1 + len(ways))
    generator, model = np.random.default_rng(0), network.graph_model()
    for node in site.nodes:
        part = part_of(model, [node.input_name], [node.output_name])
        free_ends(part)
        alone, node_alone = OnnxNetwork(part, network.source), replace(node, twins=())
        graphs = [alone, *(with_several_positions(alone, [node_alone], {node.name: way}) for way in ways)]
        pieces, spatial = node.spec.input_sizes[0], len(node.spec.kernel_size)
        shape = (batch * math.prod(pieces[:-spatial]), node.spec.in_channels, *pieces[-spatial:])
        x = {node.input_name: generator.standard_normal(shape, dtype=np.float32)}
        with tempfile.TemporaryDirectory() as scratch:
            files = []
            for number, graph in enumerate(graphs):
                files.append(Path(scratch) / f"{number}.onnx")
                graph.save(files[-1])
            turns = [(options.runtime, file) for file in files]
            timed = time_in_turns(turns, batch=batch, threads=options.threads, runs=_RUNS, inputs=x)
        times += [latency.median_ms for latency in timed.latencies]
    best = int(times.argmin())
    if best == 0 or is_unchanged(times[0] / times[best]):
        return None
    log.info(
        "%s computes %d positions at once: %.2f instead of %.2f ms",
        site.name,
        ways[best - 1].positions,
        times[best],
        times[0],
    )
    return ways[best - 1]
