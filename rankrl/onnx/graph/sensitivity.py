"""The sensitivity of a network's outputs to a node's output, measured by forward passes alone.

G = E[J' J], summed over positions (`decomposition.calibration`), says what an error in a node's output costs
at the network's outputs. Without gradients it is measured by perturbing: with random signs s_p, one for each
position p, and a small step h,

    d_c = (f(y + h s e_c) - f(y)) / h,    E_s[d_c' d_e] = sum_p (J_p' J_p)_ce = G_ce,

because the signs of different positions cancel on average (Hutchinson 1990, for a block trace). That takes
one pass of what lies behind the node for each of its channels. Outputs are divided by their own root mean
square, so that several of them count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import torch

from decomposition.calibration.metric import gram, shrunk_matrix
from decomposition.calibration.shrinkage import Spread
from rankrl.onnx.graph.batch_axes import BatchAxes
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array, depending, part_of, used_by

PASSES = (2048, 8192)
"""Inputs that are sent through what lies behind a node, all channels together: fewest and most."""
_MACS = 4e11
"""Multiply-accumulates of these passes, about, which decide between them."""
METHOD = 2
"""Raised when the same network and inputs get other matrices than before; part of the names of kept ones."""
_FEWEST, _MOST = 4, 256
_STEP = 0.05
"""The step h as a share of the root mean square of the node's output: of the size of what a fit changes."""
_ELEMENTS = 2**22
"""Numbers that a node's output may have in one pass."""


def collect_sensitivities(
    network: OnnxNetwork,
    sites: Sequence[Site],
    batches: Sequence[Feed],
    *,
    passes: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Measure the sensitivity matrix of every node's output.

    Args:
        network: The network.
        sites: The nodes, without a refusal.
        batches: Calibration inputs; the first ones are used.
        passes: Inputs that are sent through what lies behind a node and those that share its weight, all
            channels together, about; never fewer than four for each channel. As many as suit the network when
            omitted (`passes_for`).
        seed: Seed of the signs.
        progress: Called with each node's name when it is measured.

    Returns:
        G (out, out), float64, by name, shrunk towards the identity as far as few inputs leave it open.
        Nodes to which the outputs do not react are left out.
    """
    passes = passes_for(sum(site.spec.macs for site in sites)) if passes is None else passes
    generator = np.random.default_rng(seed)
    model, scales = network.graph_model(), _output_scales(network, batches)
    sensitivities: dict[str, torch.Tensor] = {}
    for site in sites:
        count = min(_MOST, max(_FEWEST, passes // (site.channels * len(site.nodes))))
        some = _first(batches, count, network.axes)
        measured = [_measured(network, model, node, some, scales, generator) for node in site.nodes]
        matrices = [matrix for matrix in measured if matrix is not None]
        if matrices:
            positions = torch.eye(math.prod(site.spread), dtype=torch.float64)  # whatever lands on one counts
            sensitivities[site.name] = torch.kron(torch.stack(matrices).sum(0), positions)
        if progress is not None:
            progress(site.name)
    return sensitivities


def passes_for(macs: int) -> int:
    """Return how many inputs are sent through what lies behind each node of a network.

    Few inputs leave much of a matrix open: ResNet-20 in Tucker at a quarter of its parameters keeps 80.9 %
    with the fewest and 81.6 % with the most (three draws), and 81.8 % with gradients.

    Args:
        macs: Multiply-accumulates of the nodes for one input.
    """
    return int(min(PASSES[1], max(PASSES[0], _MACS / max(1, macs))))


def behind(model: ir.Model, value: str) -> tuple[ir.Model, list[str]] | None:
    """Return the part of a model that depends on a value, which becomes an input of it.

    Args:
        model: The model; left as it was.
        value: Name of a value of the main graph.

    Returns:
        The part, with those outputs that depend on the value, and the names of the other values it takes;
        `None` if no output does.
    """
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


def _measured(
    network: OnnxNetwork,
    model: ir.Model,
    site: Site,
    batches: Sequence[Feed],
    scales: dict[str, float],
    generator: np.random.Generator,
) -> torch.Tensor | None:
    part_and_others = behind(model, site.output_name)
    if part_and_others is None:
        return None
    part, others = part_and_others
    captured = Captured(model, [site.output_name, *others], network.source)
    _set_types(part, captured.run(batches[0]))
    tail = GraphSession(part, network.source)
    weights = [scales[name] for name in tail.output_names]
    total, spread, inputs = torch.zeros(site.channels, site.channels, dtype=torch.float64), Spread(), 0
    size = max(1, _ELEMENTS // (site.spec.out_channels * max(1, site.spec.output_positions)))
    for batch in batches:
        for feed in network.axes.parts(batch, size):
            values = captured.run(feed)
            y, rest = values[site.output_name], {name: values[name] for name in others}
            count = network.axes.size(feed)
            rows = _reactions(tail, site, y, rest, weights, network.axes, count, generator)
            if rows is None:
                return None
            total += gram(rows).double()
            labels = torch.arange(len(rows)) // (len(rows) // count)
            spread.add(rows, labels)
            inputs += count
    matrix = total / inputs
    if not bool(torch.isfinite(matrix).all()) or not matrix.diagonal().sum() > 0:
        return None
    return shrunk_matrix(matrix, spread.shrinkage(matrix, 1 / inputs))


def _reactions(
    tail: GraphSession,
    site: Site,
    y: Array,
    rest: Feed,
    weights: Sequence[float],
    axes: BatchAxes,
    count: int,
    generator: np.random.Generator,
) -> torch.Tensor | None:
    """Return d_c for each channel c as columns, the inputs of the batch one after the other: (rows, out)."""
    plain = tail.run({site.output_name: y, **rest})
    step = _STEP * float(np.sqrt(np.mean(np.square(y, dtype=np.float64))))
    if step == 0 or not np.isfinite(step):
        return None
    axis = site.channel_axis % y.ndim
    signs = generator.choice(np.array([-step, step], dtype=y.dtype), size=y.shape)
    signs = np.take(signs, [0], axis=axis)  # one sign a position, whatever the channel
    columns = []
    for channel in range(site.channels):
        moved = y.copy()
        place: list[slice] = [slice(None)] * y.ndim
        place[axis] = slice(channel, channel + 1)
        moved[tuple(place)] += signs
        outputs = tail.run({site.output_name: moved, **rest})
        parts = [
            axes.by_input(name, (after - before).astype(np.float64), count) / (step * weight)
            for name, before, after, weight in zip(tail.output_names, plain, outputs, weights, strict=True)
            if before.dtype.kind == "f" and before.size
        ]
        if not parts:
            return None
        columns.append(np.concatenate(parts, axis=1).reshape(-1))
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))


def _set_types(part: ir.Model, values: Feed) -> None:
    """Give inputs the types of these values, and free sizes: those in the file may be of another batch."""
    for entry in part.graph.inputs:
        value = values[str(entry.name)]
        entry.type = ir.TensorType(ir.DataType.from_numpy(value.dtype))
        entry.shape = ir.Shape([None] * value.ndim)


def _output_scales(network: OnnxNetwork, batches: Sequence[Feed]) -> dict[str, float]:
    """Return each output's root mean square on the first batch, 1 where that is 0."""
    session = network.session()
    outputs = session.run(batches[0])
    scales = {}
    for name, value in zip(session.output_names, outputs, strict=True):
        size = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) if value.dtype.kind == "f" else 0.0
        scales[name] = size if size > 0 and np.isfinite(size) else 1.0
    return scales


def _first(batches: Sequence[Feed], count: int, axes: BatchAxes) -> list[Feed]:
    """Return the first inputs, in batches."""
    parts: list[Feed] = []
    left = count
    for batch in batches:
        if left <= 0:
            break
        parts.append(batch if axes.fixed is not None else axes.rows(batch, slice(left)))
        left -= axes.size(batch)
    return parts
