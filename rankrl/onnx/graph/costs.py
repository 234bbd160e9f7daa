"""What a network in an ONNX file costs as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from decomposition import CompressionPlan
from decomposition.operations.base import FLOAT_BYTES, dense_cost
from decomposition.plan.layer_plan import without_growth
from rankrl.onnx.export.operators import dequantises, is_standard
from rankrl.onnx.graph.half import HALF
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.quantised import packed, parameters_of
from rankrl.onnx.graph.site import Site

_BITS = {
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT4: 4,
    onnx.TensorProto.INT16: 16,
    onnx.TensorProto.UINT16: 16,
    onnx.TensorProto.INT32: 32,
    onnx.TensorProto.INT64: 64,
}
"""Bits of an integer, where they are not 8."""
_FLOAT_BYTES = {
    onnx.TensorProto.FLOAT: FLOAT_BYTES,
    onnx.TensorProto.DOUBLE: 8,
    **dict.fromkeys(HALF, 2),
}


def input_shape(network: OnnxNetwork, feed: Feed) -> tuple[int, ...]:
    """Return the shape of the first input for one input of the network, as plans record it."""
    first = network.inputs[0].name
    shape, axis = feed[first].shape, network.axes.inputs[first]
    return (shape if axis is None else shape[:axis] + shape[axis + 1 :]) or (1,)


def network_costs(network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, int]:
    """Count parameters, multiply-accumulates and the bytes of the parameters of a whole network.

    Parameters are the elements of all constants in floating point, and of the weights that are stored in
    integers; multiply-accumulates those of convolutions and products with a weight, for one input.
    """
    integers = {site.name for site in sites if site.spec.refusal is not None}
    params = size = 0
    weights = _integer_weights(network.model.graph, integers)
    tensors = [(each.name, each) for each in network.model.graph.initializer]
    for node in network.model.graph.node:
        if is_standard(node, "Constant"):
            tensors += [(node.output[0], each.t) for each in node.attribute if each.HasField("t")]
    for name, tensor in tensors:
        count = int(np.prod(tensor.dims))
        if tensor.data_type in _FLOAT_BYTES:
            params += count
            size += _FLOAT_BYTES[tensor.data_type] * count
        elif name in weights:
            params += count * weights[name]
            size += -(-count * _BITS.get(tensor.data_type, 8) // 8)
    return {"params": params, "macs": sum(site.spec.macs for site in sites), "bytes": size}


def plan_costs(totals: Mapping[str, int], sites: Sequence[Site], plan: CompressionPlan) -> dict[str, int]:
    """Return what a network costs under a plan, counted like `totals` (`network_costs`)."""
    found = dict(totals)
    for site in sites:
        if site.spec.refusal is not None:
            continue
        before = dense_cost(site.spec)
        after = without_growth(plan[site.name], site.spec).cost(site.spec)
        found["params"] += after.params - before.params
        found["macs"] += after.macs - before.macs
        found["bytes"] += after.bytes - before.bytes
    return found


def _integer_weights(graph: onnx.GraphProto, names: set[str]) -> dict[str, int]:
    """Return the constants that nodes of some names compute with, or that are turned to floats.

    Returns:
        How many parameters lie in one of their elements where they are integers, by their names.
    """
    found = {node.input[0]: 1 for node in graph.node if dequantises(node)}
    for node in graph.node:
        if node.name in names:
            found |= dict.fromkeys(parameters_of(node), packed(node))
    return found
