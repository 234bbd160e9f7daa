"""Recurrent layers of ONNX: listed and counted, and left as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rankrl.onnx.graph.quantised import constant
from rankrl.onnx.graph_edits import Array
from rankrl.onnx.operators import is_standard

RECURRENT = ("LSTM", "GRU", "RNN")


def is_recurrent(node: ir.Node) -> bool:
    """Tell whether a node is a recurrent layer."""
    return is_standard(node, *RECURRENT)


def recurrent_weight(node: ir.Node) -> Array | None:
    """Return a recurrent layer's weights on its inputs and on its state, side by side.

    Returns:
        An array (directions, gates * hidden, inputs + hidden), None where they are computed.
    """
    arrays = [constant(node.inputs[index]) for index in (1, 2)]
    known = [array for array in arrays if array is not None]
    return np.concatenate(known, -1) if len(known) == len(arrays) else None


def recurrent_reason(node: ir.Node) -> str:
    """Return why a recurrent layer stays as it is."""
    return (
        f"its weights are applied anew at every step of a sequence inside one node ({node.op_type}): an "
        "error would feed back on itself, which no fit accounts for"
    )


def recurrent_macs(shape: Sequence[int], params: int, batch: int) -> int:
    """Return a recurrent layer's multiply-accumulates for one input of the network.

    Args:
        shape: Shape of the sequences: (steps, sequences, inputs), or sequences first.
        params: Numbers in the weights, of all directions.
        batch: Inputs of the network that the sequences are from.
    """
    return math.prod(shape[:2]) * params // batch
