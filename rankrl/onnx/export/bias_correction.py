"""Biases that take up the mean error of integers (Nagel et al., ICCV 2019, section 4.2).

Rounding a weight, and cutting off what its input is, move the mean of every output channel. The move is
measured node by node, on the inputs that the node has in floating point, and subtracted from its bias.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

from rankrl.onnx.export.ranges import Array, Cut, Feed, tensors_of
from rankrl.onnx.graph_edits import free_ends, new_constant, part_of, stored
from rankrl.onnx.operators import dequantises, is_standard, quantises
from rankrl.onnx.protobuf import load_model, to_proto
from rankrl.onnx.runtimes.onnxruntime_cpu import inference_session


@dataclass
class _Node:
    """A node in both networks.

    Attributes:
        plain: The node in floating point.
        session: From its input there to its output in integers.
        sums: Of its outputs' means, in floating point and in integers.
        counts: Means that were added up.
    """

    plain: ir.Node
    session: onnxruntime.InferenceSession
    sums: list[Array | float] = field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, which: int, output: Array) -> None:
        """Add outputs."""
        rows = np.moveaxis(output, 1, -1) if self.plain.op_type == "Conv" else output
        rows = rows.reshape(-1, rows.shape[-1])
        self.sums[which] = self.sums[which] + rows.sum(0, dtype=np.float64)
        self.counts[which] += len(rows)

    @property
    def move(self) -> Array:
        """How far the mean of each channel moves."""
        plain, integer = (total / max(1, count) for total, count in zip(self.sums, self.counts, strict=True))
        return np.asarray(integer - plain)


def with_corrected_biases(plain: Path, quantised: ir.Model, batches: Iterable[Feed], cut: Cut) -> ir.Model:
    """Return a network in floating point whose biases make up for what integers do to its nodes.

    Args:
        plain: The network's file.
        quantised: The network in integers, as pairs of QuantizeLinear and DequantizeLinear.
        batches: Calibration inputs.
        cut: Cuts batches into smaller ones.
    """
    model = load_model(plain)
    nodes = list(_nodes(model, quantised))
    by_input: dict[str, list[_Node]] = {}
    for node in nodes:
        by_input.setdefault(str(node.plain.inputs[0].name), []).append(node)  # type: ignore[union-attr]
    by_output = {str(node.plain.outputs[0].name): node for node in nodes}
    names = list(dict.fromkeys([*by_input, *by_output]))
    for name, values in tensors_of(load_model_with_shape_infer(plain), names, batches, cut):
        for node in by_input.get(name, ()):
            (output,) = node.session.run(None, {node.session.get_inputs()[0].name: values})
            node.add(1, output)
        if name in by_output:
            by_output[name].add(0, values)
    for node in nodes:
        bias = stored(node.plain.inputs[2])
        assert bias is not None
        moved = (bias - node.move).astype(np.float32)
        node.plain.replace_input_with(2, new_constant(model.graph, f"{node.plain.name}bias", moved))
    return model


def _nodes(model: ir.Model, quantised: ir.Model) -> Iterable[_Node]:
    """Yield the nodes with a bias that compute in integers."""
    integer = {node.name: node for node in quantised.graph}
    for node in model.graph:
        if not is_standard(node, "Conv", "Gemm") or len(node.inputs) < 3 or stored(node.inputs[2]) is None:
            continue
        twin = integer.get(node.name)
        rounded = None if twin is None or twin.inputs[0] is None else twin.inputs[0].producer()
        if twin is None or rounded is None or not dequantises(rounded) or rounded.inputs[0] is None:
            continue
        rounding = rounded.inputs[0].producer()
        if rounding is None or not quantises(rounding) or rounding.inputs[0] is None:
            continue
        part = part_of(quantised, [rounding.inputs[0]], [str(twin.outputs[0].name)])
        free_ends(part)
        content = to_proto(part).SerializeToString()
        yield _Node(
            node,
            inference_session(content),
        )
