"""The copy of a network that onnxruntime's quantiser is given.

The quantiser makes up names by appending to those that there are, `x_scale` or `x_QuantizeLinear`, whether or
not they are taken: a file that it wrote before has just these. It counts the readers of a value without the
outputs of the graph and the bodies of control flow: it drops a ReLU, or takes over the range behind it, where
the value before the ReLU is wanted too. In the copy every name ends where its appendices begin, and whatever
is read outside the nodes of the graph is read through an `Identity`, which the quantiser sees.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from rankrl.onnx.graph_edits import names_in, new_name, values_in


class QuantiserCopy:
    """A network in which the quantiser's names clash with nothing, until `restore`."""

    def __init__(self, model: ir.Model) -> None:
        graph = model.graph
        self._stem = _unused_stem(graph)
        self.names: dict[str, str] = {}
        """What nodes and values were called, by what they are called in the copy."""
        self.values: dict[str, str] = {}
        """What values are called in the copy, by what they were called."""
        self._inside = set[str]()
        self.apart: list[str] = []
        """Names of the nodes through which outputs and bodies read."""
        for node in graph:
            node.name = self._hidden(node.name or "")
        for value in dict.fromkeys(values_in(graph)):
            if value.name:
                self.values[value.name] = hidden = self._hidden(value.name)
                value.name = hidden
        for value in [value for node in graph for value in node.outputs if value.name]:
            self._set_apart(graph, value)
        graph.sort()

    def _set_apart(self, graph: ir.Graph, value: ir.Value) -> None:
        """Let bodies read a value through an `Identity`, and the graph's output where nodes read it, too."""
        outside = [use for use in value.uses() if use.node.graph is not graph]
        if not outside and not (value.is_graph_output() and value.uses()):
            return
        name = str(value.name)
        value.name = self._hidden(self.names[name])
        self._inside.add(value.name)
        self.apart.append(self._hidden(""))
        seen = ir.val(name, type=value.type, shape=value.shape)
        for position, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[position] = seen
        graph.append(ir.node("Identity", [value], name=self.apart[-1], outputs=[seen]))
        for node, index in outside:
            node.replace_input_with(index, seen)

    def restore(self, model: ir.Model) -> None:
        """Give the names back and sort the nodes; what was added is named after what it belongs to."""
        graph = model.graph
        self._join(graph)
        taken = names_in(graph) | set(self.names.values())
        for named in (*graph, *dict.fromkeys(values_in(graph))):
            if named.name:
                named.name = self._given_back(named.name, taken)
        graph.sort()

    def _join(self, graph: ir.Graph) -> None:
        """Let values that were set apart be read where they are made."""
        for node in [node for node in graph if node.name in self.apart]:
            value, seen = node.inputs[0], node.outputs[0]
            if value is not None and value.producer() is not None:
                seen.replace_all_uses_with(value, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                value.name, value.type, value.shape = seen.name, seen.type, seen.shape

    def _hidden(self, name: str) -> str:
        hidden = f"{self._stem}{len(self.names)}_"
        self.names[hidden] = name
        return hidden

    def _given_back(self, name: str, taken: set[str]) -> str:
        match = re.fullmatch(rf"({self._stem}\d+_)(.*)", name, re.DOTALL)
        if match is None:
            return name
        known, added = match.groups()
        if known in self._inside and not added:  # rounded, it has the name that it had
            added = "_QuantizeLinear_Input"
        before = self.names[known] + added
        return new_name(before, taken) if added else before


def _unused_stem(graph: ir.Graph) -> str:
    """Return what no name in a graph and its bodies begins with."""
    names = names_in(graph)
    stem = "q"
    while any(name.startswith(stem) for name in names):
        stem += "q"
    return stem
