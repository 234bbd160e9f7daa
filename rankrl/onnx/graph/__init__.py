"""Compress networks in ONNX files on their own graph, without PyTorch code, labels or gradients.

A node becomes a layer of `decomposition`: a weight with its geometry, the moments of its inputs and the
sensitivity of the network's outputs to it. Fits, costs and allocation are that package's.
"""

from __future__ import annotations

from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph.inputs import ImagePreprocessing, read_inputs, split_inputs
from rankrl.onnx.graph.network import OnnxNetwork
from rankrl.onnx.graph.prepared_file import PreparedFile, network_costs
from rankrl.onnx.graph.sites import Site, find_sites

__all__ = [
    "ImagePreprocessing",
    "OnnxGraphError",
    "OnnxNetwork",
    "PreparedFile",
    "Site",
    "find_sites",
    "network_costs",
    "read_inputs",
    "split_inputs",
]
