"""Networks in ONNX files, compressed on their own graph: no PyTorch code, labels or gradients are needed.

A node becomes what `decomposition` understands, a weight with its geometry, the moments of its inputs and the
sensitivity of the network's outputs to it; fits, costs and allocation are that package's.
"""

from __future__ import annotations

from rankrl.onnx_graph.budget import network_costs
from rankrl.onnx_graph.compress import (
    TIMED_BATCH,
    Finishing,
    OnnxCompression,
    apply_onnx_plan,
    chosen_formats,
    compress_file,
    compress_onnx,
)
from rankrl.onnx_graph.errors import OnnxGraphError
from rankrl.onnx_graph.given import GivenFile
from rankrl.onnx_graph.image_files import ImagePreprocessing
from rankrl.onnx_graph.inputs import read_inputs, split_inputs
from rankrl.onnx_graph.network import OnnxNetwork
from rankrl.onnx_graph.site import Site
from rankrl.onnx_graph.sites import find_sites

__all__ = [
    "TIMED_BATCH",
    "Finishing",
    "GivenFile",
    "ImagePreprocessing",
    "OnnxCompression",
    "OnnxGraphError",
    "OnnxNetwork",
    "Site",
    "apply_onnx_plan",
    "chosen_formats",
    "compress_file",
    "compress_onnx",
    "find_sites",
    "network_costs",
    "read_inputs",
    "split_inputs",
]
