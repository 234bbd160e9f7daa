"""Write single LSTM nodes of a graph as files to be timed.

They need no neighbours: their inputs and outputs are in floating point whatever they compute with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from decomposition import Quantise
from decomposition.cache import digest
from decomposition.operations import Operation
from rankrl.kits.kit import Contents, FileGroup
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.file import quantise_lstms
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.node_layers import Site
from rankrl.onnx.graph_edits import depending, part_of, set_types


@dataclass(frozen=True, eq=False)
class LoneNode:
    """An LSTM of a network in an ONNX file."""

    network: OnnxNetwork
    site: Site
    feed: Feed

    def files(self, operations: Sequence[Sequence[Operation]], runs: int) -> FileGroup:
        """Return the node under each list of operations, to be timed."""
        spec = replace(self.site.spec, name="", index=0)
        names = [digest("node", self.network.axes.size(self.feed), spec, each) for each in operations]
        return FileGroup(tuple(names), partial(self._contents, operations), runs)

    def _contents(self, operations: Sequence[Sequence[Operation]]) -> Contents:
        part, values = self._part()
        models = []
        for each in operations:
            model = part.clone()
            bits = [one.weight_bits for one in each if isinstance(one, Quantise)]
            quantise_lstms(model, [(self.site, number) for number in bits])
            models.append(model)
        return models, values

    def _part(self) -> tuple[ir.Model, Feed]:
        """Return the node as a graph of its own, and its inputs."""
        model = self.network.graph_model()
        node = next(node for node in model.graph if node.name == self.site.name)
        variable = depending(model.graph, model.graph.inputs)
        ends = [str(value.name) for value in node.inputs if value in variable]
        values = Captured(model, ends, self.network.source).run(self.feed)
        part = part_of(model, ends, [str(output.name) for output in node.outputs if output.name])
        set_types(part, values)
        return part, values
