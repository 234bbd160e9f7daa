"""The copy of a network that onnxruntime's quantiser is given.

The quantiser makes up names by appending to those that there are, `x_scale` or `x_QuantizeLinear`, whether or
not they are taken: a file that it wrote before has just these. It counts the readers of a value without the
outputs of the graph and the bodies of control flow: it drops a ReLU, or takes over the range behind it, where
the value before the ReLU is wanted too. In the copy every name ends where its appendices begin, and whatever
is read outside the nodes of the graph is read through an `Identity`, which the quantiser sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx
from onnx import helper

from rankrl.onnx.export.values import captured_by, names_in, new_name, rename_values, sort_nodes, uses


class QuantiserCopy:
    """A network in which the quantiser's names clash with nothing, until `restore`.

    Args:
        model: The network; changed in place. Its nodes have other names from now on, its values from
            `hide_values` on.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._stem = _unused_stem(model.graph)
        self._names: dict[str, str] = {}
        """What nodes and values were called, by what they are called in the copy."""
        self.values: dict[str, str] = {}
        """What values are called in the copy, by what they were called."""
        self._inside = set[str]()
        self.apart: list[str] = []
        """Names of the nodes through which outputs and bodies read."""
        for node in model.graph.node:
            node.name = self._hidden(node.name)

    def hide_values(self, model: onnx.ModelProto) -> None:
        """Rename the values of the main graph and set those apart that are read outside of its nodes."""
        graph = model.graph
        self.values = {name: self._hidden(name) for name in dict.fromkeys(_value_names(graph))}
        rename_values(graph, self.values)
        captured = {name for node in graph.node for name in captured_by(node)}
        outputs, counts = {each.name for each in graph.output}, uses(graph)
        inside: dict[str, str] = {}
        for name in [name for node in graph.node for name in node.output]:
            if name in captured or (name in outputs and counts[name] > 1):
                inside[name] = self._hidden(self._names[name])
                self._inside.add(inside[name])
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inside.get(name, name) for name in names]
        for value in graph.value_info:
            value.name = inside.get(value.name, value.name)
        for outside, name in inside.items():
            self.apart.append(self._hidden(""))
            graph.node.append(helper.make_node("Identity", [name], [outside], self.apart[-1]))
        sort_nodes(graph)

    def restore(self, model: onnx.ModelProto) -> None:
        """Give the names back and sort the nodes; what was added is named after what it belongs to.

        Args:
            model: What the quantiser made of the copy; changed in place.
        """
        graph = model.graph
        self._join(graph)
        taken = names_in(graph) | set(self._names.values())
        nodes = self._given_back([node.name for node in graph.node], taken)
        values = self._given_back(_value_names(graph), taken)
        rename_values(graph, values)
        for node in graph.node:
            node.name = nodes.get(node.name, node.name)
        sort_nodes(graph)

    def _join(self, graph: onnx.GraphProto) -> None:
        """Let values that were set apart be read where they are made."""
        made = {name for node in graph.node for name in node.output}
        joined = [node for node in graph.node if node.name in self.apart and node.input[0] in made]
        names = {node.input[0]: node.output[0] for node in joined}
        for node in joined:
            graph.node.remove(node)
        kept = [value for value in graph.value_info if value.name not in {*names, *names.values()}]
        del graph.value_info[:]
        graph.value_info.extend(kept)
        rename_values(graph, names)

    def _hidden(self, name: str) -> str:
        hidden = f"{self._stem}{len(self._names)}_"
        self._names[hidden] = name
        return hidden

    def _given_back(self, names: Iterable[str], taken: set[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        pattern = re.compile(rf"({self._stem}\d+_)(.*)", re.DOTALL)
        for name in dict.fromkeys(names):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            known, added = match.groups()
            if known in self._inside and not added:  # rounded, it has the name that it had
                added = "_QuantizeLinear_Input"
            found[name] = self._names[known] + added
            if added:
                found[name] = new_name(found[name], taken)
        return found


def _value_names(graph: onnx.GraphProto) -> Iterable[str]:
    """Yield the names of the values that are defined in a graph, its bodies left out."""
    for values in (graph.input, graph.initializer):
        yield from (each.name for each in values)
    for node in graph.node:
        yield from filter(None, node.output)


def _unused_stem(graph: onnx.GraphProto) -> str:
    """Return what no name in a graph and its bodies begins with."""
    names = names_in(graph)
    stem = "q"
    while any(name.startswith(stem) for name in names):
        stem += "q"
    return stem
