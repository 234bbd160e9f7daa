"""Running a graph from one node to the next, while what lies behind may still change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph.network import Feed, GraphSession, open_session
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import Array, depending, part_of, producing, set_types, used_by

KEPT = 3 * 2**27
"""Bytes that a walk keeps of the values between two nodes, of all batches together.

A text detector of 64 convolutions wants 0.94 GB for 96 inputs of 480x640 pixels, most of its nodes 0.66 GB;
a refit walks through two graphs at a time.
"""


class GraphWalk:
    """The inputs of the nodes of a graph, each computed from values that were computed before.

    All batches go on to a node before any goes on to the next. What is still to be read is kept for as many
    batches as there is room for; the others begin again where they last had room, at the worst at the inputs
    of the network.
    """

    def __init__(
        self, model: ir.Model, sites: Sequence[Site], batches: Sequence[Feed], source: str, room: int = KEPT
    ) -> None:
        self._model, self._batches, self._source, self._room = model, batches, source, room
        self._ahead = deque(sites)
        self._variable = {str(value.name) for value in depending(model.graph, model.graph.inputs)}
        self._done: set[ir.Node] = set()
        self._kept: list[dict[str, Array]] = [{} for _ in batches]

    def inputs_of(self, site: Site) -> Iterator[dict[str, Array]]:
        """Yield for each batch the inputs of a node and of those that share its weight, by name."""
        names = list(dict.fromkeys(node.input_name for node in site.nodes))
        live = self._go_on_to(site)
        sessions: dict[frozenset[str], GraphSession] = {}
        for index, feed in enumerate(self._batches):
            values = {**feed, **self._kept[index]}
            missing = [name for name in dict.fromkeys([*names, *live]) if name not in values]
            if missing:
                start = frozenset(self._kept[index])
                if start not in sessions:
                    part = part_of(self._model, [*self._model.graph.inputs, *sorted(start)], missing)
                    set_types(part, values)
                    session = open_session(part, self._source, arena=False)  # values are kept one by one
                    sessions[start] = GraphSession(session, self._source)
                values |= zip(missing, sessions[start].run(values), strict=True)
            self._keep(index, {name: values[name] for name in live if name not in feed})
            yield {name: np.asarray(values[name]) for name in names}

    def _go_on_to(self, site: Site) -> list[str]:
        """Return the names of the values in front of a node that it or a later one depends on."""
        graph = self._model.graph
        values = ir.convenience.create_value_mapping(graph)
        self._done |= producing(graph, [values[site.input_name]])
        while self._ahead.popleft().name != site.name:
            pass
        ends = [values[node.input_name] for later in self._ahead for node in later.nodes]
        left = producing(graph, ends) - self._done
        read = [*ends, *(value for node in left for value in used_by(node, graph))]
        return sorted({str(each.name) for each in read if each.producer() in self._done} & self._variable)

    def _keep(self, index: int, values: dict[str, Array]) -> None:
        """Let a batch begin with these values from now on, if there is room and they can be given."""
        if any(not isinstance(value, np.ndarray) for value in values.values()):  # a sequence
            return
        kept = sum(value.nbytes for value in self._kept[index].values())
        room = self._room + kept - sum(value.nbytes for value in values.values())
        if room >= 0:
            self._room, self._kept[index] = room, values
