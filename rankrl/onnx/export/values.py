"""Values of an ONNX graph: who reads them, what they are called, and in which order nodes come.

Bodies of control flow (If, Loop, Scan) take values of the graphs around them that no node lists among its
inputs, and outputs of a graph are read by whoever runs it. Both are readers like any other here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping

import onnx


def with_subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and the bodies of its control flow, which see its values."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from with_subgraphs(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node of control flow runs."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def captured_by(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that the bodies of a node take from the graphs around them."""
    return {name for body in bodies(node) for name in _read_in(body) - _defined_in(body)}


def uses(graph: onnx.GraphProto) -> Counter[str]:
    """Count the readers of every value of a graph: nodes, bodies that capture it, and the graph's outputs."""
    counts = Counter(name for node in graph.node for name in (*node.input, *captured_by(node)) if name)
    counts.update(output.name for output in graph.output)
    return counts


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all nodes and values of a graph and its bodies."""
    found: set[str] = set()
    for each in with_subgraphs(graph):
        found |= _defined_in(each) | _read_in(each)
        found |= {value.name for value in each.value_info} | {node.name for node in each.node}
    return found


def new_name(wanted: str, taken: set[str]) -> str:
    """Return a name like the wanted one that is not taken, and take it."""
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give values of a graph other names, wherever they are read.

    Args:
        graph: The graph; changed in place. Values that a body defines itself keep their names.
        names: New names by the old ones.
    """
    defined = (graph.input, graph.value_info, graph.initializer)
    for value in (each for values in defined for each in values):
        value.name = names.get(value.name, value.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = names.get(entry.value, entry.value)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    _rename_read(graph, names)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put nodes behind those whose values they or their bodies read, and otherwise leave their order.

    Args:
        graph: The graph; changed in place. Nodes that wait for one another stay where they are, behind all
            others, for ONNX's checker to complain of.
    """
    nodes = list(graph.node)
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    waits, readers = [0] * len(nodes), [list[int]() for _ in nodes]
    for index, node in enumerate(nodes):
        for source in {producers[name] for name in (*node.input, *captured_by(node)) if name in producers}:
            waits[index] += 1
            readers[source].append(index)
    ready, order = [index for index, count in enumerate(waits) if count == 0], []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    order += sorted(set(range(len(nodes))) - set(order))
    if order != list(range(len(nodes))):
        del graph.node[:]
        graph.node.extend(nodes[index] for index in order)


def _rename_read(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for output in graph.output:
        output.name = names.get(output.name, output.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for body in bodies(node):
            own = _defined_in(body)
            _rename_read(body, {old: new for old, new in names.items() if old not in own})


def _defined_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the values that a graph makes itself."""
    found = {value.name for values in (graph.input, graph.initializer) for value in values}
    found |= {sparse.values.name for sparse in graph.sparse_initializer}
    return found | {name for node in graph.node for name in node.output}


def _read_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the values that a graph reads, its bodies included."""
    found = {output.name for output in graph.output}
    for node in graph.node:
        found |= {*node.input, *captured_by(node)}
    return found - {""}
