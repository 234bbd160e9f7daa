"""Write compressed graphs as ONNX files, and check them against dense nodes of the contracted weights.

LSTM nodes that multiply 8-bit integers become onnxruntime's DynamicQuantizeLSTM (specification:
ContribOperators.md of onnxruntime). Inputs and states are rounded to uint8 at every step, in ranges that the
kernel finds there; weights are int8, one scale for each row of a gate. There is no such kernel for GRU and
RNN, which onnxruntime's own dynamic quantiser leaves alone, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import version_converter

from rankrl.errors import OnnxGraphError
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.network_file import INT4_OPSET, rounded_tensor, store_integers
from rankrl.onnx.export.onnx_file import write_checked
from rankrl.onnx.export.static_quantiser import RangeChoice
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.network import Feed, GraphSession
from rankrl.onnx.graph.node_layers import Site
from rankrl.onnx.graph.precisions import in_half, rounds, store_narrow
from rankrl.onnx.graph.refit import CompressedGraph
from rankrl.onnx.graph.rewrite import store_pivoted
from rankrl.onnx.graph_edits import (
    MICROSOFT,
    Array,
    free_ends,
    new_constant,
    opset_of,
    part_of,
    without_unused,
)
from rankrl.onnx.protobuf import load_model, save_model, to_proto

_PLACES = {"weight": 1, "state": 2}
"""Which inputs are the weights."""
_OTHERS = 8
"""Inputs of an LSTM, those that it does without among them; scales and zero points come after them."""


def quantise_lstms(model: ir.Model, lstms: Sequence[tuple[Site, int]]) -> None:
    """Replace LSTM nodes by DynamicQuantizeLSTM with weights of the given bits."""
    graph, nodes = model.graph, {node.name: node for node in model.graph}
    for site, bits in lstms:
        node = nodes[site.name]
        inputs = [*node.inputs, *[None] * (_OTHERS - len(node.inputs))]
        for (kind, place), weight in zip(_PLACES.items(), site.recurrent_weights(site.weight), strict=True):
            integers, scales = _rounded(weight.numpy(), bits)
            inputs[place] = new_constant(graph, f"{site.name}.{kind}_integers", integers)
            zeros = np.zeros(scales.shape, np.int8)
            inputs += [
                new_constant(graph, f"{site.name}.{kind}_{what}", values)
                for what, values in (("scales", scales), ("zeros", zeros))
            ]
        attributes = [value for key, value in node.attributes.items() if key != "layout"]
        outputs = [ir.Value(name=old.name, type=old.type, shape=old.shape) for old in node.outputs]
        dynamic = ir.Node(
            MICROSOFT, "DynamicQuantizeLSTM", inputs, attributes, name=node.name, outputs=outputs
        )
        ir.convenience.replace_nodes_and_values(graph, node, [node], [dynamic], node.outputs, outputs)
    if lstms:
        model.opset_imports.setdefault(MICROSOFT, 1)
        without_unused(model)


def _rounded(weight: Array, bits: int) -> tuple[Array, Array]:
    """Return a weight in integers, (directions, columns, rows) as the kernel takes it, and its scales."""
    directions, rows, columns = weight.shape
    integers, scales = rounded_tensor(ir.tensor(weight.reshape(-1, columns)), bits, 0)
    turned = integers.numpy().reshape(weight.shape).transpose(0, 2, 1)
    return np.ascontiguousarray(turned), scales.reshape(directions, rows)


TOLERANCE = 1e-3
"""The largest difference that factorised nodes and dense ones of their contracted weights may make at the
outputs, as a share of the largest number there: sums in another order."""


def write_graph(
    graph: CompressedGraph,
    path: Path,
    calibration: Sequence[Feed],
    *,
    reduce_range: bool | None = None,
    fitted: bool = True,
    choice: RangeChoice | None = None,
) -> None:
    """Write a compressed graph; the file appears complete or not at all."""
    model = in_half(graph.model, graph.half, "the compressed network") if graph.half else graph.model.clone()
    if 4 in graph.stored.values():
        model = _with_int4(model)
    store_integers(model, graph.stored)
    with tempfile.TemporaryDirectory() as folder:
        if graph.computing:
            scratch = Path(folder) / "graph.onnx"
            save_model(model, scratch)
            quantise_onnx(
                scratch,
                scratch,
                calibration,
                weights=graph.computing,
                reduce_range=graph.reduced or reduce_range,
                cut=None if graph.axes is None else graph.axes.parts,
                fitted=fitted,
                choice=choice.without_values() if choice is not None and graph.errors else choice,
            )
            model = load_model(scratch)
        quantise_lstms(model, graph.lstms)
        rows = store_pivoted(model, graph.pivoted)
        store_narrow(model, {rows.get(name, name): kind for name, kind in graph.narrow.items()})
        write_checked(model, path, "the compressed network")


def _with_int4(model: ir.Model) -> ir.Model:
    """Convert a graph to an operator set with 4-bit weights."""
    opset = opset_of(model)
    if opset >= INT4_OPSET:
        return model
    try:
        return ir.from_proto(version_converter.convert_version(to_proto(model), INT4_OPSET))
    except Exception as error:  # the converter's own, and those of what it does not know
        raise OnnxGraphError(
            f"the file has opset {opset}; weights of 4 bits need {INT4_OPSET}, to which onnx cannot convert "
            f"it ({error}). Take int8_weights, or export the network anew"
        ) from error


def check_contracted(graph: CompressedGraph, batches: Sequence[Feed], source: str) -> float:
    """Compare a graph with the one that has dense nodes of the contracted weights."""
    assert graph.contracted is not None
    largest = 0.0
    for name, output, expected in _outputs_of_both(graph, graph.contracted, batches, source):
        if output.dtype.kind != "f" or not output.size:
            continue
        scale = max(1e-30, float(np.abs(expected).max()))  # zeros have no scale
        difference = float(np.abs(output - expected).max()) / scale
        if not difference <= TOLERANCE:  # also true of NaN
            raise OnnxGraphError(
                f"the output {name!r} of the compressed {source} differs by {difference:.2e} from what "
                f"its factors contract to; at most {TOLERANCE:.0e} is accepted. Take another format"
            )
        largest = max(largest, difference)
    return largest


def _outputs_of_both(
    graph: CompressedGraph, contracted: ir.Model, batches: Sequence[Feed], source: str
) -> Iterator[tuple[str, Array, Array]]:
    """Yield outputs of a graph and of the contracted one, by name; where it rounds, of single nodes."""
    if not any(map(rounds, graph.model.graph.all_nodes())):
        sessions = [GraphSession(model, source) for model in (graph.model, contracted)]
        for feed in batches:
            yield from zip(
                sessions[0].output_names, *(session.run(feed) for session in sessions), strict=True
            )
        return
    # The order of a sum decides whole steps at the outputs: nodes are compared on the inputs they receive.
    for node in graph.replaced:
        ends = [node.input_name, node.output_name]
        captured = Captured(graph.model, ends, source)
        part = part_of(contracted, ends[:1], ends[1:])
        free_ends(part)
        dense = GraphSession(part, source)
        for feed in batches:
            values = captured.run(feed)
            yield ends[1], values[ends[1]], dense.run(values)[0]
