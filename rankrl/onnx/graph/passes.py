"""How many inputs are sent through what lies behind each node, so that all nodes take a bounded time."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph_edits import depending

PASSES = (2048, 8192)
"""Inputs that are sent through what lies behind a node, all channels together: fewest and most, where the
whole keeps within `EFFORT`."""
_MACS = 4e11
"""Multiply-accumulates of these passes, about, which decide between them."""
EFFORT = 4e12
"""Multiply-accumulates of all passes of all nodes, about two minutes of one core in onnxruntime. They decide
instead of the clock, so that the same network and inputs get the same matrices at every call."""
_OF_ELEMENT = 15
"""Multiply-accumulates in the time of one number that nodes without weights read and write."""
_OF_NODE = 50_000
"""Multiply-accumulates in the time that a node of the graph takes whatever it computes."""


def passes_for(macs: int) -> int:
    """Return how many inputs are sent through what lies behind each node of a network at most.

    Few inputs leave much of a matrix open: ResNet-20 in Tucker at a quarter of its parameters keeps 80.9 %
    with the fewest and 81.6 % with the most (three draws), and 81.8 % with gradients.
    """
    return int(min(PASSES[1], max(PASSES[0], _MACS / max(1, macs))))


def passes_by_node(network: OnnxNetwork, sites: Sequence[Site], effort: float = EFFORT) -> list[int]:
    """Return how many inputs are sent through what lies behind each node and those that share its weight."""
    graph = network.model.graph
    values = ir.convenience.create_value_mapping(graph)
    nodes = [node for site in sites for node in site.nodes]
    work: dict[str, float] = {}
    for site in sites:
        spec = site.spec
        elements = spec.in_channels * spec.input_positions + spec.out_channels * spec.output_positions
        of_site = (spec.macs + _OF_ELEMENT * elements) / len(site.nodes)
        work |= {node.name: of_site for node in site.nodes}
    efforts = []
    for site in sites:
        behind_it = 0.0
        for node in site.nodes:
            reached = {str(value.name) for value in depending(graph, [values[node.output_name]])}
            behind_it += sum(work[each.name] for each in nodes if each.input_name in reached)
            behind_it += _OF_NODE * sum(value.name in reached for each in graph for value in each.outputs)
        efforts.append(behind_it / len(site.nodes))
    return shared_passes(efforts, passes_for(sum(site.spec.macs for site in sites)), effort)


def shared_passes(efforts: Sequence[float], wanted: int, effort: float) -> list[int]:
    """Share an effort among nodes evenly; what one does not need goes to the others."""
    shares = [0] * len(efforts)
    waiting = sorted(range(len(efforts)), key=lambda index: (efforts[index], index))
    for place, index in enumerate(waiting):
        share = effort / (len(waiting) - place)
        shares[index] = wanted if efforts[index] * wanted <= share else int(share / efforts[index])
        effort -= shares[index] * efforts[index]
    return shares
