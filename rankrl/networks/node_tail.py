"""What lies behind one node of a network in a file, run with other weights of that node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from decomposition import FitLibrary
from rankrl.networks.graph_scoring import constants_of
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.rewrite import open_constants
from rankrl.onnx.graph.sensitivity import behind
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array, names_in, new_name, set_types
from rankrl.onnx.operators import is_standard
from rankrl.onnx.output_scores import OutputScore, mean_loss

_STEPS = 255


class NodeTail:
    """What lies behind the input of a node, with the node's own input, weight and mean as inputs.

    A node that shares its weight with others has the whole network behind it, and its input stays as it is.
    All values that the inputs lead to are kept, for up to 64 inputs of small networks and 8 of large ones.
    """

    def __init__(
        self,
        network: OnnxNetwork,
        node: Site,
        feeds: Sequence[Feed],
        readers: Collection[str],
        scores: Mapping[str, OutputScore],
    ) -> None:
        self._node, self._scores, self._axes = node, scores, network.axes
        model = network.graph_model()
        self._alone = len(node.nodes) == 1
        self._low, self._rounds_output = _rounding_behind(model.graph, node, readers)
        part_and_others = behind(model, node.input_name) if self._alone else (network.graph_model(), [])
        self._session: GraphSession | None = None
        if part_and_others is None:
            return
        part, others = part_and_others
        self._values = [dict(feed) for feed in feeds]
        if self._alone:
            captured = Captured(model, [node.input_name, *others], network.source)
            self._values = [captured.run(feed) for feed in feeds]
            set_types(part, self._values[0])
        self._opened = open_constants(part, node)
        for name in filter(None, (self._opened.weight, self._opened.mean)):
            entry = part.graph.initializers.pop(name)
            entry.const_value, entry.type = None, ir.TensorType(ir.DataType.FLOAT)
            part.graph.inputs.append(entry)
        self._reached = [str(output.name) for output in part.graph.outputs]
        if self._alone:
            self._open_ends(part.graph)
        self._session = GraphSession(part, network.source)

    def _open_ends(self, graph: ir.Graph) -> None:
        """Let the node read an input of its own, and add another input to its output, which is shown."""
        node = next(node for node in graph if node.name == self._node.name)
        taken = names_in(graph)
        kind = ir.TensorType(ir.DataType.FLOAT)
        own, added = (ir.val(new_name(f"{node.name}.{what}", taken), type=kind) for what in ("own", "added"))
        graph.inputs.extend([own, added])
        node.replace_input_with(0, own)
        output = node.outputs[0]
        total = ir.node(
            "Add", [output, added], outputs=[ir.val(new_name(f"{output.name}.sum", taken), type=kind)]
        )
        for user, index in tuple(output.uses()):
            if user is not total:
                user.replace_input_with(index, total.outputs[0])
        for position, value in enumerate(graph.outputs):
            if value is output:
                graph.outputs[position] = total.outputs[0]
        graph.insert_after(node, total)
        output.type, output.shape = kind, None
        graph.outputs.append(output)
        self._own, self._added = str(own.name), str(added.name)

    def losses(
        self, library: FitLibrary, weights: Sequence[torch.Tensor], integer: Sequence[bool]
    ) -> list[float]:
        """Return the loss under each weight; see `rankrl.networks.graph_losses.NodeLosses.of`."""
        if self._session is None:
            return [0.0] * len(weights)
        node, session = self._node, self._session
        original = constants_of(library, node, self._opened, library.weights[node.name])
        plain = [self._run(session, values, original) for values in self._values]
        if self._alone:
            x = [values[node.input_name] for values in self._values]
            taken, returned = _range(x), _range([outputs[-1] for outputs in plain])
            returned = (max(returned[0], self._low), returned[1])
        losses = []
        reached = [self._scores[name] for name in self._reached]
        for weight, rounds in zip(weights, integer, strict=True):
            constants = constants_of(library, node, self._opened, weight)

            def after(values: Feed, constants: Feed = constants, rounds: bool = rounds) -> list[Array]:
                if not rounds or not self._alone:
                    return self._run(session, values, constants)
                own = _rounded(values[node.input_name], taken)
                outputs = self._run(session, values, constants, own=own)
                if not self._rounds_output:
                    return outputs
                added = _rounded(outputs[-1], returned) - outputs[-1]
                return self._run(session, values, constants, own=own, added=added)

            pairs = zip(plain, self._values, strict=True)
            answers = (
                (self._of_network(before), self._of_network(after(values))) for before, values in pairs
            )
            # Outputs that are not reached lose nothing.
            losses.append(mean_loss(reached, answers) * len(reached) / len(self._scores))
        return losses

    def _of_network(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the network's outputs, inputs on the first axis."""
        pairs = zip(self._reached, outputs, strict=False)
        return [np.atleast_1d(self._axes.first_axis(name, output)) for name, output in pairs]

    def _run(
        self,
        session: GraphSession,
        values: Feed,
        constants: Feed,
        *,
        own: Array | None = None,
        added: Array | None = None,
    ) -> list[Array]:
        feed = {**values, **constants}
        if self._alone:
            feed[self._own] = values[self._node.input_name] if own is None else own
            feed[self._added] = np.zeros(1, np.float32) if added is None else added
        return session.run(feed)


def _rounding_behind(graph: ir.Graph, node: Site, readers: Collection[str]) -> tuple[float, bool]:
    """Return below what a node's output is cut off, and whether anything takes it but nodes that round it."""
    value = next(each for each in graph if each.name == node.name).outputs[0]
    low, uses = -np.inf, tuple(value.uses())
    if len(uses) == 1 and is_standard(uses[0].node, "Relu") and not value.is_graph_output():
        value, low = uses[0].node.outputs[0], 0.0  # rounded together, it is rounded behind the ReLU
    return low, value.is_graph_output() or any(use.node.name not in readers for use in value.uses())


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """Return the least and greatest numbers, 0 among them."""
    return min(0.0, *(float(each.min()) for each in values)), max(
        0.0, *(float(each.max()) for each in values)
    )


def _rounded(values: Array, limits: tuple[float, float]) -> Array:
    """Return numbers rounded to 8 bits within a range that holds 0, as QuantizeLinear does it."""
    scale = (limits[1] - limits[0]) / _STEPS
    if scale == 0:
        return values
    zero = round(-limits[0] / scale)
    steps = np.clip(np.rint(values / scale) + zero, 0, _STEPS) - zero
    return (steps * scale).astype(np.float32)
