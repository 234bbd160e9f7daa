"""Capture the inputs of a graph's nodes in onnxruntime, and estimate their moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from decomposition.calibration.calibration_set import remedy_for_gaps
from decomposition.calibration.metric import is_finite, labels_or_single, with_mean
from decomposition.calibration.moments import (
    PATCHES_PER_LAYER,
    UNREACHED,
    InputMoments,
    MomentAccumulator,
    check_memory,
)
from decomposition.errors import DecompositionError
from decomposition.memory import within_room
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
from decomposition.network.layers import DecomposableModule
from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph.batch_axes import BatchAxes
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.node_layers import Site
from rankrl.onnx.graph_edits import Array, until

_CAPTURED = 2**28
"""Bytes of captured values at a time."""
_ACTIVE = 2**24
"""Bytes of the largest input of a node in one pass: onnxruntime holds several values of that size at a time,
and fewer inputs in each leave room to capture more nodes in a pass."""
_LARGEST = 2**26
"""The same where one node is looked at in a pass."""
CHOOSING_ELEMENTS, FINAL_ELEMENTS = 2**23, 2**24
"""Numbers in the patches of one node, to choose ranks by and to fit in the end: a kernel of many positions
has large patches, and the time of a fit grows with their number squared."""
_NARROW, _NARROW_ELEMENTS = 1024, 2**25
"""Patches of so many numbers at most are fitted by their second moments, in a time that their number does not
matter for."""
_TRIED = 64
"""Inputs with gaps that are run."""


def most_patches(site: Site, elements: int, patches: int = PATCHES_PER_LAYER) -> int:
    """Return the number of patches drawn of a node's input, at most `elements` numbers if they are wide."""
    width = site.weight[0].numel()
    return max(1, min(patches, (_NARROW_ELEMENTS if width <= _NARROW else elements) // width))


def collect_moments(
    network: OnnxNetwork,
    sites: Sequence[Site],
    batches: Sequence[Feed],
    *,
    seed: int = 0,
    unreached: list[str] | None = None,
) -> dict[str, InputMoments]:
    """Estimate moments of nodes' input patches; `unreached` takes nodes without inputs, None refuses them."""
    check_memory([(site.weight[0].numel(), most_patches(site, CHOOSING_ELEMENTS)) for site in sites])
    generator = torch.Generator().manual_seed(seed)
    accumulators = {site.name: MomentAccumulator() for site in sites}
    largest = min(max(map(network.axes.size, batches)), max(1, _ACTIVE // max(map(_bytes, sites), default=1)))
    for group in _groups(sites, largest):
        _accumulate(network, sites, group, batches, largest, accumulators, generator)
    for name in [name for name, accumulator in accumulators.items() if accumulator.empty]:
        if unreached is None:
            raise OnnxGraphError(f"node {name!r} of {network.source}: {UNREACHED}; give inputs that do")
        unreached.append(name)
        del accumulators[name]
    # Each accumulator is free before the next one's matrix is made.
    by_name = {name: accumulators.pop(name).moments() for name in list(accumulators)}
    for site in (site for site in sites if site.name in by_name):
        moments = by_name[site.name]
        if not is_finite(moments.covariance):
            raise DecompositionError(f"node {site.name!r}: the moments of its input are not finite")
        if site.absorber is None:  # its errors are not corrected around the mean
            whole = with_mean(moments.covariance, moments.mean)
            by_name[site.name] = InputMoments(
                torch.zeros_like(moments.mean), whole, moments.count, moments.shrinkage
            )
    return by_name


def _accumulate(
    network: OnnxNetwork,
    sites: Sequence[Site],
    group: Sequence[Site],
    batches: Sequence[Feed],
    largest: int,
    accumulators: Mapping[str, MomentAccumulator],
    generator: torch.Generator,
) -> None:
    """Add patches of the inputs of some nodes, `largest` inputs of the network at most in each pass."""
    inputs = [node.input_name for site in group for node in site.nodes]
    session = Captured(network.model, inputs, network.source)
    layers = {node.name: node.module() for site in group for node in site.nodes}
    total = sum(map(network.axes.size, batches))
    at_a_time = within_room(_CAPTURED, "values in front of nodes")
    fitting = min(largest, max(1, at_a_time // sum(map(_bytes, group))))
    for feed in (part for whole in batches for part in network.axes.parts(whole, fitting)):
        values, size = session.run(feed), network.axes.size(feed)
        for site in group:
            share = max(1, most_patches(site, CHOOSING_ELEMENTS) * size // total // len(site.nodes))
            for node in site.nodes:
                received = [values[node.input_name]]
                if received[0].size == 0:
                    continue
                if not np.isfinite(received[0]).all():
                    check_finite(network, sites, feed, f"{network.source} computes NaN or infinite values")
                patches, labels = drawn_patches(node, layers[node.name], received, share, generator, size)
                accumulators[site.name].add(patches[0], labels_or_single(labels, total))


def check_gaps(network: OnnxNetwork, sites: Sequence[Site], batches: Sequence[Feed]) -> None:
    """Refuse inputs from which NaN or infinite values reach a node to be fitted."""
    axes = network.axes
    found = [(feed, gaps) for feed in batches if len(gaps := _gaps(feed, axes))]
    count, total = sum(len(gaps) for _, gaps in found), sum(map(axes.size, batches))
    number = f"{count} of {total} inputs" if count > 1 else "an input"
    tried = 0
    for feed, gaps in found:
        few = feed if axes.fixed is not None else axes.rows(feed, gaps[: _TRIED - tried])
        check_finite(network, sites, few, f"the inputs hold NaN or infinite values in {number}")
        tried += len(gaps)
        if tried >= _TRIED:
            break


def check_finite(network: OnnxNetwork, sites: Sequence[Site], feed: Feed, holds: str) -> None:
    """Refuse a batch with which nodes receive NaN or infinite values."""
    nodes = [node.input_name for site in sites for node in site.nodes]
    outputs = [str(value.name) for value in network.model.graph.outputs]
    session = Captured(network.model, [*nodes, *outputs], network.source)
    finite: dict[str, bool] = dict.fromkeys([*nodes, *outputs], True)
    for part in network.axes.parts(feed, 1):  # the values of all nodes at a time
        for name, value in session.run(part).items():
            finite[name] &= value.dtype.kind not in "fc" or bool(np.isfinite(value).all())
    seeing = [site.name for site in sites if not all(finite[node.input_name] for node in site.nodes)]
    if seeing:
        masked = all(finite[name] for name in outputs)
        raise OnnxGraphError(f"{holds}{remedy_for_gaps(seeing, masked=masked)}")


def _gaps(feed: Feed, axes: BatchAxes) -> Array:
    """Return a mask of the inputs of a batch that hold NaN or infinite values."""
    found = np.zeros(axes.size(feed), bool)
    for name, value in feed.items():
        if value.dtype.kind == "f" and not (finite := np.isfinite(value)).all():
            axis = axes.inputs[name]
            others = tuple(index for index in range(value.ndim) if index != axis)
            found |= True if axis is None else ~finite.all(others)
    return np.flatnonzero(found)


def in_parts(axes: BatchAxes, sites: Sequence[Site], batches: Sequence[Feed]) -> list[Feed]:
    """Split batches so that the input of a single node fits into one pass."""
    largest = within_room(_LARGEST, "the input of a node")
    size = max(1, largest // max(map(_bytes, sites), default=1))
    return [part for batch in batches for part in axes.parts(batch, size)]


def drawn_patches(
    site: Site,
    layer: DecomposableModule,
    inputs: Sequence[Array],
    count: int,
    generator: torch.Generator,
    batch: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw the same random patches from several inputs of a node."""
    counting = site.counting_axis(inputs[0].shape, batch)
    tensors = [site.padded(np.moveaxis(x, counting, 0)).float() for x in inputs]
    patches, labels = sample_labelled_patches(layer, tensors, count, generator)
    return patches, labels_of_batch(labels, len(tensors[0]), batch)


class Captured:
    """A session that returns values of a graph by name, inputs of the graph among them."""

    def __init__(self, model: ir.Model, names: Sequence[str], source: str) -> None:
        entries = {value.name for value in model.graph.inputs}
        self._given = [name for name in dict.fromkeys(names) if name in entries]
        computed = [name for name in dict.fromkeys(names) if name not in entries]
        self._session = GraphSession(until(model, computed), source) if computed else None

    def run(self, feed: Feed) -> dict[str, Array]:
        """Return the values for one batch."""
        values = {name: np.asarray(feed[name]) for name in self._given}
        if self._session is not None:
            values |= dict(zip(self._session.output_names, self._session.run(feed), strict=True))
        return values


def _bytes(site: Site) -> int:
    """Return the bytes of a node's input for one input of the network."""
    return 4 * site.spec.in_channels * max(1, site.spec.input_positions)


def _groups(sites: Sequence[Site], batch: int) -> list[list[Site]]:
    """Return the nodes in groups that are captured together."""
    groups: list[list[Site]] = []
    room = 0
    for site in sites:
        if not groups or _bytes(site) * batch > room:
            groups.append([])
            room = _CAPTURED
        groups[-1].append(site)
        room -= _bytes(site) * batch
    return groups
