"""The proof that a file was read rightly: written anew with the weights that were read, it says the same."""

from __future__ import annotations

import onnx_ir as ir

from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork, open_session
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.quantised import rounds
from rankrl.onnx.graph.reading import free_sizes
from rankrl.onnx.graph.rewrite import MARKED, replace_node
from rankrl.onnx.graph_edits import without_unused
from rankrl.onnx.protobuf import load_model
from rankrl.verify.fidelity import COARSE_FLOOR, FLOOR, departure, nudged, relative_error

_INPUTS = 4
"""Inputs that are compared: a network that is read wrongly is wrong on any."""


def check_as_read(prepared: PreparedFile) -> None:
    """Refuse a file that would be compressed as something else than it is.

    Some held-out inputs are sent through the file as it lies there, and through what is about to be
    compressed: the network as it was read and rewritten, every node that can be compressed put there anew, as
    a dense one with the weight that was read for it. How far they may differ is seen by running the file
    without onnxruntime's optimisations, and on inputs that are nudged a little. That costs three sessions and
    four passes of four inputs.
    """
    source = prepared.original.source
    feed = next(prepared.network.axes.parts(prepared.split.heldout[0], _INPUTS))
    dense = _written_anew(prepared)
    content = _content(prepared.original)
    file = GraphSession(open_session(content, source), source)
    plain = GraphSession(open_session(content, source, optimised=False), source)
    floor = COARSE_FLOOR if _rounds(prepared) else FLOOR
    noisy = [plain.run(feed), file.run({name: nudged(value) for name, value in feed.items()})]
    told = departure(
        file.output_names, file.run(feed), noisy, GraphSession(dense, source).run(feed), floor=floor
    )
    if told is None:
        return
    node = _first_departing(source, dense, feed, floor)
    where = "" if node is None else f", first of all that of the node {node!r}"
    converted = f" ({prepared.original.converted})" if prepared.original.converted else ""
    raise OnnxGraphError(
        f"{source} would be compressed as another network than it is: with nothing compressed yet, {told}"
        f"{where}{converted}. Leave that node as it is (skip), or export the network anew, to ONNX's own "
        "operators in a newer operator set"
    )


def _content(network: OnnxNetwork) -> ir.Model | str:
    """Return the path of a file, or its content.

    That is changed where sizes are 0, which onnxruntime obeys, and where outputs are no tensors.
    """
    model = load_model(network.source)
    return model if free_sizes(model.graph) or network.aside.outputs else network.source


def _written_anew(prepared: PreparedFile) -> ir.Model:
    """Return the network with every node that can be compressed in the place of itself."""
    model = prepared.network.graph_model()
    for site in prepared.sites:
        if site.spec.refusal is None and not site.hidden:
            replace_node(model, site, [each.module(MARKED) for each in site.nodes], None)
    return without_unused(model)


def _rounds(prepared: PreparedFile) -> bool:
    """Tell whether the network rounds by itself, to half precision or to integers."""
    return bool(prepared.network.half) or any(map(rounds, prepared.network.graph_model().graph.all_nodes()))


def _first_departing(source: str, dense: ir.Model, feed: Feed, floor: float) -> str | None:
    """Return the name of the first node of a file whose output is another one in a graph; None for none."""
    file = load_model(source)
    made = {output.name for node in dense.graph for output in node.outputs}
    nodes = {
        str(output.name): node.name or f"{node.op_type} that computes {output.name}"
        for node in file.graph
        for output in node.outputs
        if output.name in made
    }
    try:
        before, after = (Captured(each, list(nodes), source).run(feed) for each in (file, dense))
    except OnnxGraphError:  # a value that is no tensor
        return None
    return next(
        (name for value, name in nodes.items() if not relative_error(before[value], after[value]) <= floor),
        None,
    )
