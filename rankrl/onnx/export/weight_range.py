"""Weights in 7 bits for processors whose 8-bit sums overflow.

x86 processors without VNNI add two products of 8 bits in 16 (VPMADDUBSW), where 2 * 255 * 127 does not fit
and is cut off: the file runs as fast as ever, and its numbers are wrong. With weights of 7 bits
(onnxruntime's `reduce_range`) no sum overflows.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import nn

from decomposition import Inputs, calibrate_ranges, integer_layers, rounded_parameters
from decomposition.network.rounding import REDUCED_BITS, reduce_weight_range
from decomposition.network.surgery import copied
from rankrl.onnx.protobuf import save_model
from rankrl.onnx.runtimes import open_session

_OPSET = 13

log = logging.getLogger(__name__)


@cache
def sums_overflow() -> bool:
    """Tell whether onnxruntime cuts off sums of uint8 times int8 on this processor, by trying.

    It does on x86 processors without VNNI: AVX2, and AVX-512 before Cascade Lake.
    """
    terms = 64
    inputs = ir.val("inputs", ir.DataType.UINT8, [1, terms])
    weights = ir.val("weights", const_value=ir.tensor(np.full((terms, 16), 127, dtype=np.int8)))
    result = ir.val("sums", ir.DataType.INT32, [1, 16])
    node = ir.node("MatMulInteger", [inputs, weights], outputs=[result])
    opsets = {"": _OPSET}
    graph = ir.Graph([inputs], [result], nodes=[node], initializers=[weights], opset_imports=opsets)
    graph.name = "largest sums"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.onnx"
        save_model(ir.Model(graph, ir_version=8), path)
        (sums,) = open_session(path).run(np.full((1, terms), 255, dtype=np.uint8))
    overflow = bool((sums != 255 * 127 * terms).any())
    if overflow:
        log.info(
            "this processor's 8-bit sums overflow (no VNNI): weights of what computes in integers get 7 bits"
        )
    return overflow


def as_in_file(
    network: nn.Module, reduce_range: bool | None, inputs: Iterable[Inputs] | None = None
) -> nn.Module:
    """Return the network whose simulated integers are those of its file, a copy where they are not its own.

    All weights that compute in integers have as many bits: where a plan gives some of them 7, all get 7.
    """
    bits = integer_bits(network)
    if 8 not in bits or not (REDUCED_BITS in bits or reduces(reduce_range)):
        return network
    reduced = reduce_weight_range(copied(network))
    if inputs is not None:
        calibrate_ranges(reduced, inputs)
    return reduced


def integer_bits(network: nn.Module) -> set[int]:
    """Return the bits of the weights that compute in integers."""
    bits = rounded_parameters(network)
    return {bits[f"{name}.weight"] for name in integer_layers(network)}


def runnable(precisions: Sequence[str], reduce_range: bool | None = None) -> tuple[str, ...]:
    """Return precisions with `int7` in the place of `int8` where weights are to have 7 of 8 bits."""
    if "int8" not in precisions or not reduces(reduce_range):
        return tuple(precisions)
    return tuple(dict.fromkeys("int7" if name == "int8" else name for name in precisions))


def reduces(reduce_range: bool | None) -> bool:
    """Return what was asked for, or else what this processor needs."""
    return sums_overflow() if reduce_range is None else reduce_range
