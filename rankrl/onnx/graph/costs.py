"""Parameters, multiply-accumulates and bytes of a whole network in an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from decomposition import CompressionPlan
from decomposition.operations.operation import dense_cost
from decomposition.plan.plan import without_growth
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.quantised import packed, parameters_of
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph.twins import use_counts
from rankrl.onnx.operators import dequantises, is_standard


def network_costs(network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, int]:
    """Count parameters, multiply-accumulates and the bytes of the parameters of a whole network.

    Parameters are the elements of all constants in floating point, and of the weights that are stored in
    integers; bytes what these constants take as the file stores them; multiply-accumulates those of
    convolutions and products with a weight, for one input.
    """
    integers = {site.name for site in sites if site.spec.refusal is not None}
    params = size = 0
    graph = network.model.graph
    weights = _integer_weights(graph, integers)
    tensors = [*graph.initializers.tensor_items()]
    for node in graph:
        if is_standard(node, "Constant") and "value" in node.attributes:
            tensors.append((str(node.outputs[0].name), node.attributes["value"].as_tensor()))
    for name, tensor in tensors:
        if tensor.dtype.is_floating_point() or name in weights:
            params += tensor.size * weights.get(name, 1)
            size += network.stored_bytes(name, tensor)
    return {"params": params, "macs": sum(site.spec.macs for site in sites), "bytes": size}


def compression_costs(network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, int]:
    """Count a network as plans change it: a node that is compressed gets a bias of its own.

    Biases that several nodes share count once for each of them, so that no plan takes more than it says.
    """
    costs, uses = network_costs(network, sites), use_counts(network.model.graph)
    for site in sites:
        if site.spec.refusal is None and site.bias is not None and uses[site.bias_name] > len(site.nodes):
            costs["bytes"] += site.spec.storage.bias * site.spec.out_channels
    return costs


def plan_costs(totals: Mapping[str, int], sites: Sequence[Site], plan: CompressionPlan) -> dict[str, int]:
    """Return what a network costs under a plan, counted like `totals` (`compression_costs`)."""
    costs = dict(totals)
    for site in sites:
        if site.spec.refusal is not None:
            continue
        before = dense_cost(site.spec)
        after = without_growth(plan[site.name], site.spec).cost(site.spec)
        costs["params"] += after.params - before.params
        costs["macs"] += after.macs - before.macs
        costs["bytes"] += after.bytes - before.bytes
    return costs


def _integer_weights(graph: ir.Graph, names: set[str]) -> dict[str, int]:
    """Return the constants that nodes of some names compute with, or that are turned to floats."""
    packed_counts = {str(node.inputs[0].name): 1 for node in graph if dequantises(node) and node.inputs[0]}
    for node in graph:
        if node.name in names:
            packed_counts |= dict.fromkeys(parameters_of(node), packed(node))
    return packed_counts
