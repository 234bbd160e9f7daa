"""Choose the forms of layers by their times: rank multiples, stages or contracted, several positions."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from decomposition import contracted, factorised_layers, inspect_layers
from decomposition.cache import Cache, digest
from decomposition.network.inputs import InputShape
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied, replace_module
from decomposition.progress import progress_bar
from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.rewrite import (
    SeveralPositions,
    possible_positions,
    to_metadata,
    with_several_positions,
)
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import free_ends, part_of
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions
from rankrl.timing.latency import is_unchanged, measuring_conditions, time_in_turns
from rankrl.timing.layer_latency import LayerTimer
from rankrl.timing.network_timer import relative_time

log = logging.getLogger(__name__)

_RUNS = 9


def faster_positions(
    network: OnnxNetwork, sites: Sequence[Site], feed: Feed, options: LatencyOptions
) -> dict[str, SeveralPositions]:
    """Return the axis and number of positions of nodes that are faster when they compute several at once.

    Nodes are timed alone, then the network as a whole; the result is empty where that is no faster.
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
        times += [latency.ms for latency in timed.latencies]
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


STEPS = (32, 16, 8, 4)
"""Widths to try, the widest first."""
_ALIKE = 0.93
"""A rank that takes this part of the time at the step's end, or more, is no faster than that."""
_SHAPE = (16, 64, 32, 32)  # batch, channels, height, width of the timed convolutions
_ELSEWHERE = 8
"""For processors that are not at hand: two registers of floats with NEON, one with AVX2."""
_STEP_RUNS = 60  # many, since steps and a straight line differ by little


@lru_cache(maxsize=4)
def fast_multiple(folder: Path | None = None, runtime: str = DEFAULT_RUNTIME) -> int:
    """Return the number whose multiples are the fastest ranks, in a runtime on this processor.

    It is the width of the widest step in which the times of a few convolutions grow (16 with AVX-512).
    """
    conditions = measuring_conditions(_SHAPE[0], 1, runtime)
    key = digest(conditions, STEPS, _SHAPE, _STEP_RUNS)
    return Cache(folder).value("rank-multiple", key, lambda: _measured_step(runtime))


def suited_multiple(timing: LatencyOptions) -> int:
    """Return the number of which ranks are multiples in plans for the timed device."""
    return fast_multiple(timing.folder, timing.runtime) if not timing.tables else _ELSEWHERE


def _measured_step(runtime: str) -> int:
    ranks = sorted({rank for step in STEPS for start in (step, 2 * step) for rank in _step(start, step)})
    timer = LayerTimer(batch=_SHAPE[0], threads=1, runs=_STEP_RUNS, runtime=runtime)
    times = timer.alone([nn.Conv2d(_SHAPE[1], rank, 1) for rank in ranks], _SHAPE)
    multiple = step_of(dict(zip(ranks, times.tolist(), strict=True)))
    log.info("ranks are multiples of %d: as many as this processor computes at a time", multiple)
    return multiple


def step_of(times: dict[int, float]) -> int:
    """Return the width of the widest steps in which times grow, the least width if there are none."""
    for step in STEPS:
        pairs = [_step(start, step) for start in (step, 2 * step)]
        if all(times[middle] / times[end] >= _ALIKE for middle, end in pairs):
            return step
    return STEPS[-1]


def _step(start: int, step: int) -> tuple[int, int]:
    """Return the rank halfway up the step behind `start`, and its end."""
    return start + step // 2, start + step


_FORM_RUNS = 7
_FASTER = 0.95
"""A layer is contracted where that takes less than this part of the time of its stages."""


def fastest_form(
    network: nn.Module,
    shape: InputShape,
    scratch: Path,
    *,
    timing: Mapping[str, Any],
    timed: Batch | None,
    channel_block: int,
    **options: Any,
) -> tuple[nn.Module, str, Path | None]:
    """Return the form of a compressed network that is fastest in the runtime, its name, and its file.

    Fewer multiply-accumulates are not always faster: `staged` runs the cores of a layer as layers,
    `contracted` multiplies them once, `mixed` takes what is faster in each layer. The choice is kept in
    `scratch` for a resumed run. The file is None where no file of this form was written now.
    """
    layers = factorised_layers(network)
    if not layers:
        return network, "dense", None
    if is_rounded(network):  # cores are stored as they are, stages computed in integers
        return network, "staged", None

    def file_of(name: str, form: nn.Module) -> Path:
        path = scratch / f"{name}.onnx"
        export_onnx(form, path, shape, channel_block=channel_block, **options)
        return path

    files = {"staged": file_of("staged", network)}

    def fastest() -> tuple[str, list[str]]:
        slow = faster_contracted(network, shape, timing, channel_block)
        tried = {"staged": [], "mixed": slow, "contracted": list(layers)}
        if len(slow) in (0, len(layers)):
            del tried["mixed"]
        files.update(
            {name: file_of(name, contracted(network, tried[name])) for name in tried if name != "staged"}
        )
        how = dict(timing)
        runtime = how.pop("runtime", DEFAULT_RUNTIME)
        turns = [(runtime, path) for path in files.values()]
        times = time_in_turns(turns, inputs=timed, **how)
        best = 0
        for other in range(1, len(turns)):
            compared = times.compare(best, other)
            if compared.ratio > 1 and not compared.unchanged:
                best = other
        name = list(tried)[best]
        return name, tried[name]

    key = digest(files["staged"].read_bytes())
    name, names = Cache(scratch).value("form", key, fastest)
    return (network if name == "staged" else contracted(network, names)), name, files.get(name)


def faster_contracted(
    network: nn.Module, shape: InputShape, timing: Mapping[str, Any], channel_block: int
) -> list[str]:
    """Return the names of the layers that are faster contracted, timed one by one between neighbours."""
    dense, whole = copied(network), factorised_layers(contracted(network))
    for layer in factorised_layers(dense).values():
        replace_module(dense, layer, layer.geometry.dense(dtype=layer.cores()[0].dtype))
    specs = {spec.name: spec for spec in inspect_layers(dense.cpu(), shape)}
    names = []
    timer = LayerTimer(**{**timing, "runs": _FORM_RUNS}, channel_block=channel_block)
    for name, layer in factorised_layers(network).items():
        spec = specs.get(name)
        if spec is not None and spec.input_sizes and layer.execution != whole[name].execution:
            staged, one = timer.forms(spec, [layer, whole[name]])
            if one < _FASTER * staged:
                names.append(name)
    return names
