"""From a compressed graph to a file, integers included, and the proof that it computes what it should."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from rankrl.export.graph import set_metadata
from rankrl.export.int8 import quantise_onnx
from rankrl.export.network_file import store_integers
from rankrl.files import write_atomically
from rankrl.onnx_graph.errors import OnnxGraphError
from rankrl.onnx_graph.network import Feed, GraphSession
from rankrl.onnx_graph.refit import CompressedGraph

TOLERANCE = 1e-3
"""The largest difference that factorised nodes and dense ones of their contracted weights may make at the
outputs, as a share of the largest number there: sums in another order."""
_INT4_OPSET = 21


def write_graph(
    graph: CompressedGraph,
    path: Path,
    calibration: Sequence[Feed],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a compressed graph; the file appears complete or not at all.

    Args:
        graph: The graph.
        path: The file to write.
        calibration: Batches that set the ranges of activations, where nodes compute in integers.
        metadata: Text to store in the file, beside what it holds already.

    Raises:
        OnnxGraphError: The graph needs a newer operator set for weights of 4 bits, or is not valid.
        ExportError: onnxruntime cannot quantise it.
    """
    proto = ir.to_proto(graph.model)
    opset = graph.model.opset_imports.get("", 0)
    if 4 in graph.stored.values() and opset < _INT4_OPSET:
        raise OnnxGraphError(
            f"the file has opset {opset}; weights of 4 bits need {_INT4_OPSET}. Take int8_weights, or "
            "convert the file first (onnx.version_converter)"
        )
    if metadata:
        known = {entry.key: entry.value for entry in proto.metadata_props}
        set_metadata(proto, {**known, **metadata})
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise OnnxGraphError(f"the compressed graph is not valid: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "graph.onnx"
        scratch.write_bytes(proto.SerializeToString())
        if graph.stored:
            products = {node.input[1] for node in proto.graph.node if node.op_type == "MatMul"}
            store_integers(scratch, graph.stored, products & set(graph.stored))
        if graph.computing:
            quantise_onnx(scratch, scratch, calibration, weights=graph.computing, partly=True)
        write_atomically(path, scratch.read_bytes())


def check_contracted(graph: CompressedGraph, batches: Sequence[Feed], source: str) -> float:
    """Compare a graph with the one that has dense nodes of the contracted weights.

    Args:
        graph: The graph, before any rounding.
        batches: Inputs.
        source: Where it is from, for messages.

    Returns:
        The largest difference at an output, as a share of the largest number there.

    Raises:
        OnnxGraphError: It is above the tolerance, or not finite.
    """
    assert graph.contracted is not None
    sessions = [GraphSession(model, source) for model in (graph.model, graph.contracted)]
    largest = 0.0
    for feed in batches:
        outputs = [session.run(feed) for session in sessions]
        for name, found, expected in zip(sessions[0].output_names, *outputs, strict=True):
            if found.dtype.kind != "f" or not found.size:
                continue
            scale = max(1e-30, float(np.abs(expected).max()))
            difference = float(np.abs(found - expected).max()) / scale
            if not difference <= TOLERANCE:  # also true of NaN
                raise OnnxGraphError(
                    f"the output {name!r} of the compressed {source} differs by {difference:.2e} from what "
                    f"its factors contract to; at most {TOLERANCE:.0e} is accepted. Take another format"
                )
            largest = max(largest, difference)
    return largest
