"""Writing a compressed graph to a file, integers included, and verifying what it computes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import version_converter

from rankrl.onnx.export.checked_file import write_checked
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.network_file import INT4_OPSET, store_integers
from rankrl.onnx.export.range_choice import RangeChoice
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.dynamic_lstm import quantise_lstms
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph.half import in_half, store_narrow
from rankrl.onnx.graph.network import Feed, GraphSession
from rankrl.onnx.graph.pivoted import store_pivoted
from rankrl.onnx.graph.quantised import rounds
from rankrl.onnx.graph.refit import CompressedGraph
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array, free_ends, part_of
from rankrl.onnx.operators import opset_of
from rankrl.onnx.protobuf import load_model, save_model, to_proto

TOLERANCE = 1e-3
"""The largest difference that factorised nodes and dense ones of their contracted weights may make at the
outputs, as a share of the largest number there: sums in another order."""


def write_graph(
    graph: CompressedGraph,
    path: Path,
    calibration: Sequence[Feed],
    metadata: Mapping[str, str] | None = None,
    *,
    reduce_range: bool | None = None,
    fitted: bool = True,
    choice: RangeChoice | None = None,
) -> None:
    """Write a compressed graph; the file appears complete or not at all."""
    model = in_half(graph.model, graph.half, "the compressed network") if graph.half else graph.model.clone()
    if 4 in graph.stored.values():
        model = _with_int4(model)
    model.metadata_props.update(metadata or {})
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
                partly=True,
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
    """Return a graph in an operator set that has weights of 4 bits."""
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
    """Compare a graph with the one that has dense nodes of the contracted weights.

    Where the graph rounds on its way, the order of a sum decides whole steps at its outputs; there every
    replaced node is compared by itself, on the inputs that it receives.
    """
    assert graph.contracted is not None
    pairs = _node_by_node if any(map(rounds, graph.model.graph.all_nodes())) else _as_a_whole
    largest = 0.0
    for name, output, expected in pairs(graph.model, graph.contracted, graph.replaced, batches, source):
        if output.dtype.kind != "f" or not output.size:
            continue
        scale = max(1e-30, float(np.abs(expected).max()))
        difference = float(np.abs(output - expected).max()) / scale
        if not difference <= TOLERANCE:  # also true of NaN
            raise OnnxGraphError(
                f"the output {name!r} of the compressed {source} differs by {difference:.2e} from what "
                f"its factors contract to; at most {TOLERANCE:.0e} is accepted. Take another format"
            )
        largest = max(largest, difference)
    return largest


def _as_a_whole(
    model: ir.Model, contracted: ir.Model, nodes: Sequence[Site], batches: Sequence[Feed], source: str
) -> Iterator[tuple[str, Array, Array]]:
    """Yield the outputs of both graphs, by name."""
    del nodes
    sessions = [GraphSession(graph, source) for graph in (model, contracted)]
    for feed in batches:
        yield from zip(sessions[0].output_names, *(session.run(feed) for session in sessions), strict=True)


def _node_by_node(
    model: ir.Model, contracted: ir.Model, nodes: Sequence[Site], batches: Sequence[Feed], source: str
) -> Iterator[tuple[str, Array, Array]]:
    """Yield what replaced nodes give and what the dense ones give of the same inputs, by its name."""
    for node in nodes:
        ends = [node.input_name, node.output_name]
        captured = Captured(model, ends, source)
        part = part_of(contracted, ends[:1], ends[1:])
        free_ends(part)
        dense = GraphSession(part, source)
        for feed in batches:
            values = captured.run(feed)
            yield ends[1], values[ends[1]], dense.run(values)[0]
