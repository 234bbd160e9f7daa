"""Calibrate the nodes of a graph: moments of their inputs, sensitivity of the outputs to theirs.

The sensitivity matrix G = E[J'J] of the outputs to a node's output is measured in onnxruntime: finite
differences along random directions stand for all channels, and sketches (random projections) for all outputs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from decomposition.cache import Cache, digest
from decomposition.calibration.calibration_set import remedy_for_gaps
from decomposition.calibration.metric import (
    WIDEST,
    is_finite,
    labels_or_single,
    shrunk_matrix,
    squared_norm,
    trace,
    with_mean,
)
from decomposition.calibration.moments import (
    PATCHES_PER_LAYER,
    UNREACHED,
    InputMoments,
    MomentAccumulator,
    check_memory,
)
from decomposition.calibration.units import known_answers, output_weight
from decomposition.errors import DecompositionError
from decomposition.memory import within_room
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
from decomposition.network.layers import DecomposableModule
from rankrl.errors import OnnxGraphError, counted
from rankrl.onnx.graph.network import BatchAxes, Feed, GraphSession, OnnxNetwork, by_input
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import Array, depending, part_of, set_types, until, used_by
from rankrl.onnx.output_scores import OutputScore, output_score

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


log = logging.getLogger(__name__)

SKETCHED = 256
"""Numbers that are kept of the outputs for one input."""


@dataclass(frozen=True)
class Directions:
    """Directions in which the C channels of a node are moved: each channel by itself, or K random ones.

    With K orthonormal directions U, uniformly distributed, and a symmetric matrix G (C, C),

        E[U U' G U U'] = a G + b tr(G) I,    b = K (C - K) / ((C - 1) C (C + 2)),
                                             a = K (K + 2) / (C (C + 2)) - b,

    which follows from G = I, where both sides are K / C, and G = e e', for a unit vector e, where e'UU'e has
    a beta distribution with K / 2 and (C - K) / 2. So G is estimated from U' G U without bias, and exactly
    where K = C.
    """

    matrix: Array

    @classmethod
    def drawn(cls, channels: int, count: int, generator: np.random.Generator) -> Directions:
        """Draw directions; each channel by itself where there are as many as channels."""
        if count >= channels:
            return cls(np.eye(channels, dtype=np.float32))
        drawn = generator.standard_normal((channels, count), dtype=np.float32)
        matrix, triangle = np.linalg.qr(drawn)
        return cls(matrix * np.sign(np.diagonal(triangle)))  # uniform with these signs (Mezzadri 2007)

    def sensitivities(self, reactions: torch.Tensor) -> torch.Tensor:
        """Return an estimate of J'J for every input, shape (inputs, channels, channels), float64."""
        channels, count = self.matrix.shape
        if count == channels:
            return (reactions.mT @ reactions).double()
        rows = reactions @ torch.from_numpy(self.matrix).T
        products = (rows.mT @ rows).double()
        b = count * (channels - count) / ((channels - 1) * channels * (channels + 2))
        a = count * (count + 2) / (channels * (channels + 2)) - b
        traces = products.diagonal(dim1=1, dim2=2).sum(1) * channels / count
        products.diagonal(dim1=1, dim2=2).sub_(b * traces[:, None])
        return products / a


class Sketch:
    """A random projection S of the outputs for one input on few numbers, with E[S'S] = I.

    Every number is added, with a random sign, to one of 256 sums (feature hashing, Weinberger et al., ICML
    2009); products of rows keep their expectation, with a standard deviation of about sqrt(2 / 256) of their
    lengths' product. Few numbers stay as they are.
    """

    def __init__(self, numbers: int, generator: np.random.Generator, kept: int = SKETCHED) -> None:
        self.kept = min(kept, numbers)
        self._order, self._signs = None, np.zeros(0, np.float32)
        if numbers > kept:
            self._order = generator.permutation(numbers)
            self._signs = generator.choice(np.array([-1, 1], np.float32), size=numbers)

    def of(self, rows: Array) -> Array:
        """Return the sketches of rows (inputs, numbers), shape (inputs, `kept`)."""
        if self._order is None:
            return rows
        signed = rows[:, self._order] * self._signs
        whole = np.pad(signed, ((0, 0), (0, -rows.shape[1] % self.kept)))
        return whole.reshape(len(rows), -1, self.kept).sum(1)


PASSES = (2048, 8192)
"""Inputs that are sent through what lies behind a node, all channels together: fewest and most, where the
whole keeps within `EFFORT`."""
_MACS = 4e11
"""Multiply-accumulates of these passes, about, which decide between them. Few inputs leave much of a matrix
open: ResNet-20 in Tucker at a quarter of its parameters keeps 80.9 % with the fewest and 81.6 % with the most
(three draws), and 81.8 % with gradients."""
EFFORT = 4e12
"""Multiply-accumulates of all passes of all nodes, about two minutes of one core in onnxruntime. They decide
instead of the clock, so that the same network and inputs get the same matrices at every call."""
_OF_ELEMENT = 15
"""Multiply-accumulates in the time of one number that nodes without weights read and write."""
_OF_NODE = 50_000
"""Multiply-accumulates in the time that a node of the graph takes whatever it computes."""


def passes_for(macs: int) -> int:
    """Return the largest number of inputs that are sent through the tail of each node."""
    return int(min(PASSES[1], max(PASSES[0], _MACS / max(1, macs))))


def passes_by_node(network: OnnxNetwork, sites: Sequence[Site], effort: float = EFFORT) -> list[int]:
    """Return the numbers of inputs sent through the tail of each node and of those that share its weight."""
    graph = network.model.graph
    values = ir.convenience.create_value_mapping(graph)
    nodes = [node for site in sites for node in site.nodes]
    work: dict[str, float] = {}
    for site in sites:
        spec = site.spec
        elements = spec.in_channels * spec.input_positions + spec.out_channels * spec.output_positions
        of_site = (spec.macs + _OF_ELEMENT * elements) / len(site.nodes)
        work |= {node.name: of_site for node in site.nodes}
    efforts = []
    for site in sites:
        behind_it = 0.0
        for node in site.nodes:
            reached = {str(value.name) for value in depending(graph, [values[node.output_name]])}
            behind_it += sum(work[each.name] for each in nodes if each.input_name in reached)
            behind_it += _OF_NODE * sum(value.name in reached for each in graph for value in each.outputs)
        efforts.append(behind_it / len(site.nodes))
    return shared_passes(efforts, passes_for(sum(site.spec.macs for site in sites)), effort)


def shared_passes(efforts: Sequence[float], wanted: int, effort: float) -> list[int]:
    """Share an effort among nodes evenly; the others get the part that a node does not need."""
    shares = [0] * len(efforts)
    waiting = sorted(range(len(efforts)), key=lambda index: (efforts[index], index))
    for place, index in enumerate(waiting):
        share = effort / (len(waiting) - place)
        shares[index] = wanted if efforts[index] * wanted <= share else int(share / efforts[index])
        effort -= shares[index] * efforts[index]
    return shares


_SECONDS = 180
"""Seconds of processor time after which no further node is measured, where a network has much that is not
counted, such as loops."""
FEWEST_PASSES = 64
"""Fewer than these say little; a node that there are no more for is fitted without a matrix."""
METHOD = 5
"""Raised when the same network and inputs get other matrices than before; part of the names of kept ones."""
_FEWEST, _MOST = 4, 256
ANSWERED = 32
"""Inputs whose outputs tell what they are scored by."""
_STEP = 0.05
"""The step h as a share of the root mean square of the node's output: of the size of what a fit changes."""
_ELEMENTS = 2**22
"""Numbers that a node's output, or the outputs of the network, may have in one pass."""


class _NoTimeError(Exception):
    """The time for all nodes is spent."""


def collect_sensitivities(
    network: OnnxNetwork,
    sites: Sequence[Site],
    batches: Sequence[Feed],
    *,
    passes: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Measure the sensitivity matrix of every node's output, by name; keep each in `folder` at once."""
    counts = passes_by_node(network, sites) if passes is None else [passes] * len(sites)
    measurement, start = _Measurement(network, sites, batches), time.process_time()
    key = None if folder is None else digest(METHOD, seed, network.axes, network.digest, batches)
    sensitivities: dict[str, torch.Tensor] = {}
    left_out = []
    for site, count in zip(sites, counts, strict=True):
        if site.spec.out_channels > WIDEST:
            left_out.append(site.name)
            continue
        names = [node.name for node in site.nodes]

        def measured(site: Site = site, count: int = count) -> dict[str, torch.Tensor]:
            if count // len(site.nodes) < FEWEST_PASSES or time.process_time() - start > _SECONDS:
                raise _NoTimeError
            return measurement.of_nodes(site, count, seed)

        try:
            kept = Cache(folder).tensors("sensitivity", digest(key, names, count), measured)
        except _NoTimeError:
            left_out.append(site.name)
            continue
        if kept:
            positions = torch.eye(math.prod(site.spread), dtype=torch.float64)  # whatever lands on one counts
            sensitivities[site.name] = torch.kron(kept["matrix"], positions)
        if progress is not None:
            progress(site.name)
    if left_out:
        log.info(
            "%s of %s are fitted without a sensitivity, which would take more than two minutes or be too "
            "large: %s",
            counted(len(left_out), "node"),
            network.source,
            ", ".join(left_out),
        )
    return sensitivities


def behind(model: ir.Model, value: str) -> tuple[ir.Model, list[str]] | None:
    """Return the part of a model that depends on a value, which becomes an input of it."""
    start = ir.convenience.create_value_mapping(model.graph)[value]
    reached = depending(model.graph, [start])
    outputs = [str(output.name) for output in model.graph.outputs if output in reached]
    if not outputs:
        return None
    variable = depending(model.graph, model.graph.inputs)
    taken: dict[str, None] = {}
    for computed in reached - {start}:
        producer = computed.producer()
        for used in used_by(producer, model.graph) if producer is not None else ():
            if used not in reached and used in variable:
                taken[str(used.name)] = None
    others = sorted(taken)
    return part_of(model, [value, *others], outputs), others


class _Measurement:
    """The state that the measurements of all nodes share."""

    def __init__(self, network: OnnxNetwork, sites: Sequence[Site], batches: Sequence[Feed]) -> None:
        self._network, self._batches = network, batches
        self._model = network.graph_model()
        self._sites = sites

    @cached_property
    def _fitting(self) -> int:
        return fitting_inputs(self._network, self._sites, self._batches[0])

    @cached_property
    def _scores(self) -> dict[str, tuple[OutputScore, Array]]:
        """The score of each output, and the factor of its numbers."""
        network = self._network
        session = network.session()
        batches = first_inputs(self._batches, ANSWERED, network.axes)
        feeds = [feed for batch in batches for feed in network.axes.parts(batch, self._fitting)]
        answers = [session.run(feed) for feed in feeds]
        scores = {}
        for name, parts in zip(session.output_names, zip(*answers, strict=True), strict=True):
            rows = [np.atleast_1d(network.axes.first_axis(name, part)) for part in parts]
            score, weight = output_score(name, rows), np.ones(())
            if rows[0].dtype.kind == "f":
                weight = output_weight(known_answers(map(score.numbers, rows)), score.units)
            scores[name] = score, weight
        return scores

    def _numbers(self, name: str, output: Array) -> Array:
        """Return the numbers by whose change an output's change is measured, scaled, inputs first."""
        score, weight = self._scores[name]
        return score.numbers(np.atleast_1d(self._network.axes.first_axis(name, output))) * weight

    def of_nodes(self, site: Site, passes: int, seed: int) -> dict[str, torch.Tensor]:
        """Return the matrix of a node and those that share its weight as `matrix`, nothing without one."""
        generator = np.random.default_rng([seed, int(digest(site.name)[:8], 16)])
        measured = [self._of_node(node, passes // len(site.nodes), generator) for node in site.nodes]
        matrices = [matrix for matrix in measured if matrix is not None]
        return {"matrix": torch.stack(matrices).sum(0)} if matrices else {}

    def _of_node(self, site: Site, passes: int, generator: np.random.Generator) -> torch.Tensor | None:
        network, source = self._network, self._network.source
        part_and_others = behind(self._model, site.output_name)
        if part_and_others is None:
            return None
        part, others = part_and_others
        captured = Captured(self._model, [site.output_name, *others], source)
        set_types(part, captured.run(network.axes.one(self._batches[0])))
        tail = GraphSession(part, source)
        inputs = min(_MOST, max(_FEWEST, passes // site.channels))
        count = min(site.channels, max(1, passes // inputs))
        size = 1 if count < site.channels else self._fitting  # each input in directions of its own
        total, squares, seen = torch.zeros(site.channels, site.channels, dtype=torch.float64), 0.0, 0
        for batch in first_inputs(self._batches, inputs, network.axes):
            for feed in network.axes.parts(batch, size):
                values = captured.run(feed)
                y, rest = values[site.output_name], {name: values[name] for name in others}
                directions = Directions.drawn(site.channels, count, generator)
                reactions = self._reactions(
                    tail, site, y, rest, directions, network.axes.size(feed), generator
                )
                if reactions is None:
                    return None
                for reaction in reactions:  # of one input after the other, which are large
                    matrix = directions.sensitivities(reaction[None])[0]
                    total += matrix
                    squares += float(matrix.square().sum())
                seen += len(reactions)
        matrix = total / seen
        if not bool(torch.isfinite(matrix).all()) or not matrix.diagonal().sum() > 0:
            return None
        if seen < 2:
            return matrix if count == site.channels else None
        # Ledoit & Wolf 2004, as in `decomposition.calibration.metric`, with inputs as the summands, whose
        # variance is divided by one less than their number: there may be four.
        size_of_it = squared_norm(matrix)
        distance = size_of_it - trace(matrix) ** 2 / site.channels
        variance = (squares / seen - size_of_it) / (seen - 1)
        return shrunk_matrix(matrix, min(max(variance / distance, 0.0), 1.0) if distance > 0 else 0.0)

    def _reactions(
        self,
        tail: GraphSession,
        site: Site,
        y: Array,
        rest: Feed,
        directions: Directions,
        count: int,
        generator: np.random.Generator,
    ) -> torch.Tensor | None:
        """Return J U for each of the `count` inputs of a batch: (count, numbers, directions)."""
        if y.size == 0:
            return None
        plain = zip(tail.output_names, tail.run({site.output_name: y, **rest}), strict=True)
        step = _STEP * float(np.sqrt(np.mean(np.square(y, dtype=np.float64))))
        if step == 0 or not np.isfinite(step):
            return None
        axis = site.channel_axis % y.ndim
        signs = generator.choice(np.array([-step, step], dtype=y.dtype), size=y.shape)
        signs = np.take(signs, [0], axis=axis)  # one sign a position, whatever the channel
        shape = [-1 if each == axis else 1 for each in range(y.ndim)]
        known = {
            name: self._numbers(name, value)
            for name, value in plain
            if value.dtype.kind == "f" and value.size
        }
        sketch, columns = None, []
        for direction in directions.matrix.T:
            moved = y + signs * direction.reshape(shape).astype(y.dtype)
            outputs = tail.run({site.output_name: moved, **rest})
            parts = [
                by_input((self._numbers(name, after) - known[name]) / step, count)
                for name, after in zip(tail.output_names, outputs, strict=True)
                if name in known
            ]
            if not parts:
                return None
            rows = np.concatenate(parts, axis=1)
            sketch = Sketch(rows.shape[1], generator) if sketch is None else sketch
            columns.append(sketch.of(rows).astype(np.float32))
        return torch.from_numpy(np.stack(columns, axis=2))


def fitting_inputs(network: OnnxNetwork, sites: Sequence[Site], batch: Feed) -> int:
    """Return the number of inputs per pass with which no value becomes too large."""
    first = network.axes.one(batch)
    outputs = sum(map(np.size, network.session().run(first))) // network.axes.size(first)
    specs = [site.spec for site in sites]
    largest = [spec.in_channels * spec.input_positions for spec in specs]
    largest += [spec.out_channels * spec.output_positions for spec in specs]
    return max(1, _ELEMENTS // max(1, outputs, *largest))


def first_inputs(batches: Sequence[Feed], count: int, axes: BatchAxes) -> list[Feed]:
    parts: list[Feed] = []
    left = count
    for batch in batches:
        if left <= 0:
            break
        parts.append(batch if axes.fixed is not None else axes.rows(batch, slice(left)))
        left -= axes.size(batch)
    return parts
