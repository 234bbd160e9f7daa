"""Times of an LSTM of a file, alone: what it takes and gives is floating point whatever it computes with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from decomposition import Quantise
from decomposition.operations import Operation
from rankrl.onnx.graph.capture import Captured
from rankrl.onnx.graph.dynamic_lstm import quantise_lstms
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import depending, part_of, set_types
from rankrl.onnx.protobuf import save_model
from rankrl.onnx.runtimes import Session, open_session
from rankrl.timing.passes import clock_for, timed_passes

_WARM_UP = 6


@dataclass(frozen=True, eq=False)
class LoneNode:
    """An LSTM of a network in an ONNX file.

    Attributes:
        network: The network.
        site: The node.
        feed: Inputs of the network, for which the node is timed.
    """

    network: OnnxNetwork
    site: Site
    feed: Feed

    def times(self, operations: Sequence[Sequence[Operation]], *, threads: int, runs: int) -> np.ndarray:
        """Return the median milliseconds of the node under each list of operations.

        Args:
            operations: None, or a rounding.
            threads: Threads of onnxruntime.
            runs: Timed passes of each.
        """
        part, values = self._part()
        sessions: list[Session] = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "node.onnx"
            for each in operations:
                model = part.clone()
                bits = [one.weight_bits for one in each if isinstance(one, Quantise)]
                quantise_lstms(model, [(self.site, number) for number in bits])
                save_model(model, path)
                sessions.append(open_session(path, threads=threads))
        count, clock = len(sessions), clock_for(threads)
        times, _ = timed_passes(
            sessions, [values] * count, [clock] * count, runs=runs, warm_up=_WARM_UP, settle=True
        )
        return np.median(times, axis=0)

    def _part(self) -> tuple[ir.Model, Feed]:
        """Return the node as a graph of its own, and what it takes."""
        model = self.network.graph_model()
        node = next(node for node in model.graph if node.name == self.site.name)
        variable = depending(model.graph, model.graph.inputs)
        ends = [str(value.name) for value in node.inputs if value in variable]
        values = Captured(model, ends, self.network.source).run(self.feed)
        part = part_of(model, ends, [str(output.name) for output in node.outputs if output.name])
        set_types(part, values)
        return part, values
