"""Find weights stored in integers or half precision, and convert graphs between float32 and half."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common as passes

from decomposition import CompressionPlan, PlanError, Quantise
from rankrl.errors import ConfigError, OnnxGraphError
from rankrl.onnx.graph_edits import (
    MICROSOFT,
    STANDARD,
    Array,
    depending,
    dequantises,
    free_name,
    is_standard,
    new_constant,
    node_of,
    put_first,
    quantises,
    used_by,
    values_in,
    without_unused,
)

log = logging.getLogger(__name__)

MOVING = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
"""Operators behind which a constant is the same one, turned or reshaped."""

_OPSET = 21
"""An operator set in which the reference evaluator knows all that is followed, as those before it do it."""
_OPERANDS = {
    "QLinearConv": (3, 8),
    "QLinearMatMul": (3, 0),
    "QGemm": (3, 6),
    "ConvInteger": (1,),
    "MatMulInteger": (1, 0),
    "MatMulIntegerToFloat": (1, 6),
    "DynamicQuantizeMatMul": (1, 4),
    "DynamicQuantizeLSTM": (1, 2, 3, 7),
    "MatMulNBits": (1, 5),
    "QAttention": (1, 2),
}
"""Which inputs of integer operators may be parameters, the weight first; others are scales and zero points.

Specifications: ai.onnx, and onnxruntime's ContribOperators.md for those of com.microsoft.
"""


def computes_integers(node: ir.Node) -> bool:
    return node.op_type in _OPERANDS and node.domain in (*STANDARD, MICROSOFT)


def rounds(node: ir.Node) -> bool:
    """Tell whether a node rounds: the smallest change of its input may become a whole step of its output."""
    return quantises(node) or computes_integers(node) or is_standard(node, "DynamicQuantizeLinear")


def parameters_of(node: ir.Node) -> list[str]:
    """Return the names of a node's weights and biases, without scales and zero points of integers."""
    operands = _OPERANDS[node.op_type] if computes_integers(node) else range(len(node.inputs))
    values = [node.inputs[index] for index in operands if index < len(node.inputs)]
    return [str(value.name) for value in values if value is not None]


def packed(node: ir.Node) -> int:
    """Return the number of parameters packed in one stored element of a node's weight."""
    return 8 // node.attributes.get_int("bits", 4) if node.op_type == "MatMulNBits" else 1


def integer_weight(node: ir.Node) -> Array | None:
    """Return the weight of a node that computes in integers, zeros of its shape where it is packed."""
    if node.op_type == "MatMulNBits":
        sizes = [node.attributes[name].as_int() for name in ("K", "N")]
        return np.broadcast_to(np.int8(0), sizes)
    operands = _OPERANDS[node.op_type][: 2 if "MatMul" in node.op_type else 1]
    values = [node.inputs[index] for index in operands if index < len(node.inputs)]
    return next((weight for weight in map(constant, values) if weight is not None), None)


def constant(value: ir.Value | None, followed: Sequence[str] = ()) -> Array | None:
    """Return a constant, perhaps transposed or reshaped; None where it depends on the inputs."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    producer = value.producer()
    if producer is None or not is_standard(producer, *MOVING, *followed) or producer.graph is None:
        return None
    if any(operand is not None and constant(operand, followed) is None for operand in producer.inputs):
        return None
    graph = ir.convenience.extract(producer.graph, [], [value])
    graph.opset_imports[""] = max(_OPSET, graph.opset_imports.get("", 0))
    part = ir.Model(graph, ir_version=10)
    outputs: Any = ReferenceEvaluator(ir.to_proto(part)).run(None, {})
    return np.asarray(outputs[0])


def rounded_constant(value: ir.Value | None) -> Array | None:
    """Return the constant behind QuantizeLinear and DequantizeLinear; as stored behind onnxruntime's own."""
    array = constant(value, ("QuantizeLinear", "DequantizeLinear"))
    producer = None if value is None else value.producer()
    if array is None and producer is not None and (dequantises(producer) or quantises(producer)):
        return rounded_constant(producer.inputs[0])
    return array


def is_rounded(value: ir.Value | None) -> bool:
    """Tell whether a value is the output of a DequantizeLinear, perhaps transposed or reshaped."""
    producer = None if value is None else value.producer()
    while producer is not None and is_standard(producer, *MOVING) and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    return producer is not None and dequantises(producer)


HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
HALF_BYTES = 2
_TYPES = frozenset(("to", "dtype", "output_dtype", "stash_type", "softmax_precision"))
"""Attributes that name a type."""
_NO_INTEGERS = (
    "a file in half precision is handed back in half precision, which integers do not go with; export it in "
    "float32 for them"
)
_WIDENED = "rankrl_float32_"
_MEAN, _VARIANCE = 3, 4  # inputs of BatchNormalization


@dataclass(frozen=True)
class HalfValues:
    """The values of a graph that are in half precision in its file."""

    types: Mapping[str, ir.DataType] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    computes: bool = False

    def __bool__(self) -> bool:
        return bool(self.types)


def half_values(model: ir.Model) -> HalfValues:
    model = model.clone()
    passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    attributes: dict[tuple[str, str], int] = {}
    for node in model.graph.all_nodes():
        known = [_type(value) for value in node.inputs]
        guess = next((kind for kind in known if kind in HALF), None)
        for value in node.outputs:  # of foreign operators nothing is inferred
            if guess is not None and not value.dtype:
                value.type = ir.TensorType(guess)
    values = {str(value.name): value for graph in model.graphs() for value in values_in(graph)}
    taking_part = _taking_part(model)
    types = {name: _type(value) for name, value in values.items() if value in taking_part}
    half = {name: kind for name, kind in types.items() if kind in HALF}
    for node in model.graph.all_nodes():
        named = node.attributes.values() if is_standard(node) and node.outputs[0] in taking_part else ()
        for attribute in named:
            if attribute.name in _TYPES and attribute.value in HALF:
                attributes[str(node.outputs[0].name), attribute.name] = attribute.as_int()
    computes = any(
        not is_standard(node, *MOVING)
        and any(value is not None and value.name in half for value in (*node.inputs, *node.outputs))
        for node in model.graph.all_nodes()
    )
    return HalfValues(half, frozenset(values), attributes, computes)


def _taking_part(model: ir.Model) -> set[ir.Value]:
    """Find the values that depend on inputs, and constants but for those that are only cast to float32."""
    graph = model.graph
    found = depending(graph, graph.inputs)
    found.update(value for body in model.graphs() if body is not graph for value in values_in(body))
    for node in reversed(graph):
        widens = is_standard(node, "Cast") and _type(node.outputs[0]) not in HALF
        if not widens and any(value in found for value in node.outputs):
            found.update(used_by(node, graph))
    return found


def in_float32(model: ir.Model, half: HalfValues) -> ir.Model:
    """Return a model with its half-precision values in float32, its inputs excepted."""
    wide = model.clone()
    for value in [value for graph in wide.graphs() for value in values_in(graph)]:
        if value.name not in half.types:
            continue
        if value.const_value is not None:
            value.const_value = _widened(value.const_value)
        if value.type is not None and value not in wide.graph.inputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in wide.graph.all_nodes():
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and node.outputs[0].name in half.types:
                node.attributes.add(ir.AttrTensor(attribute.name, _widened(attribute.as_tensor())))
            elif (node.outputs[0].name, attribute.name) in half.attributes:
                node.attributes.add(ir.AttrInt64(attribute.name, ir.DataType.FLOAT))
    for entry in reversed(wide.graph.inputs):
        if entry.name in half.types:
            uses = list(entry.uses())
            cast = node_of("Cast", [entry], f"{_WIDENED}{entry.name}", {"to": int(ir.DataType.FLOAT)})
            for node, index in uses:
                node.replace_input_with(index, cast.outputs[0])
            put_first(wide.graph, [cast])
    return wide


def in_half(model: ir.Model, half: HalfValues, source: str) -> ir.Model:
    """Return a model that `in_float32` made, perhaps changed since, in the original's precision."""
    narrow = model.clone()
    for node in [node for node in narrow.graph if str(node.name).startswith(_WIDENED)]:
        if is_standard(node, "Cast") and node.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            narrow.graph.remove(node, safe=True)
    types = _types_of_new(narrow, half)
    for value in [value for graph in narrow.graphs() for value in values_in(graph)]:
        if value.name in types:
            kind = types[value.name]
            if value.is_initializer() and value.const_value is not None:
                value.const_value = _narrowed(value.const_value, kind, source)
            if value.type is not None:
                value.type = ir.TensorType(kind)
    for node in narrow.graph.all_nodes():
        name = str(node.outputs[0].name)
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR:
                if name in types and node.op_type in ("Constant", "ConstantOfShape"):
                    tensor = _narrowed(attribute.as_tensor(), types[name], source)
                    node.attributes.add(ir.AttrTensor(attribute.name, tensor))
            elif (name, attribute.name) in half.attributes:
                node.attributes.add(ir.AttrInt64(attribute.name, half.attributes[name, attribute.name]))
    return narrow


def store_narrow(model: ir.Model, kinds: Mapping[str, ir.DataType]) -> None:
    """Store float32 constants of a graph in half precision, from which it casts them as it runs."""
    graph, casts = model.graph, []
    for name, kind in kinds.items():
        value = graph.initializers.get(name)
        if value is None or value.const_value is None or value.const_value.dtype != ir.DataType.FLOAT:
            continue
        stored = new_constant(graph, f"{name}_half", _narrowed(value.const_value, kind, "a weight").numpy())
        cast = node_of("Cast", [stored], free_name(graph, f"{name}_Cast"), {"to": int(ir.DataType.FLOAT)})
        value.replace_all_uses_with(cast.outputs[0])
        del graph.initializers[name]
        casts.append(cast)
    put_first(graph, casts)


def without_casts(model: ir.Model, kinds: Collection[ir.DataType]) -> bool:
    """Store constants in float32 that are cast to it; tell whether there were any."""
    graph, known = model.graph, dict[ir.Value, ir.Value]()
    for node in list(graph):
        value = node.inputs[0] if is_standard(node, "Cast") else None
        if value is None or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            continue
        if node.outputs[0].is_graph_output():
            continue
        array = constant(value)
        if array is None or ir.DataType.from_numpy(array.dtype) not in kinds:
            continue
        if value not in known:
            known[value] = new_constant(graph, f"{value.name}_float", array.astype(np.float32))
        node.outputs[0].replace_all_uses_with(known[value])
    if known:
        without_unused(model)
    return bool(known)


def without_integers(precisions: Sequence[str], source: str) -> tuple[str, ...]:
    """The precisions that nodes of a file in half precision may choose from, with a warning if fewer."""
    if "float32" not in precisions:
        raise ConfigError(f"{source}: {_NO_INTEGERS}")
    if len(precisions) > 1:
        log.warning("%s: %s; precisions=float32 alone is taken", source, _NO_INTEGERS)
    return ("float32",)


def check_without_integers(plan: CompressionPlan, source: str) -> None:
    """Refuse a plan that rounds nodes of a file in half precision."""
    rounded = [layer.name for layer in plan if layer.operation(Quantise) is not None]
    if rounded:
        raise PlanError(f"the plan rounds {rounded[0]!r} of {source} to integers; {_NO_INTEGERS}")


def _types_of_new(model: ir.Model, half: HalfValues) -> dict[str, ir.DataType]:
    """Return the types of all values in half precision, of new ones too."""
    types = dict(half.types)
    for node in model.graph.all_nodes():
        kind = _computed_in(node, types)
        for output in node.outputs:
            if kind and output.name not in half.names:
                types[str(output.name)] = kind
    for node in model.graph.all_nodes():
        kind = types.get(str(node.outputs[0].name)) or _computed_in(node, types)
        for position, value in enumerate(node.inputs):
            if value is None or not value.is_initializer() or value.name in half.names:
                continue
            # A mean has the type of its variance.
            is_mean = is_standard(node, "BatchNormalization") and position == _MEAN
            variance = node.inputs[_VARIANCE] if is_mean else None
            own = kind if variance is None else types.get(str(variance.name))
            if own:
                types[str(value.name)] = own
    return types


def _computed_in(node: ir.Node, types: Mapping[str, ir.DataType]) -> ir.DataType | None:
    """Return the type in half precision that a node computes in by its first input, `None` for none."""
    return next((types.get(str(value.name)) for value in node.inputs[:1] if value is not None), None)


def _type(value: ir.Value | None) -> ir.DataType | None:
    return value.dtype if value is not None and isinstance(value.type, ir.TensorType) else None


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if tensor.dtype not in HALF:
        return tensor
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _narrowed(tensor: ir.TensorProtocol, kind: ir.DataType, source: str) -> ir.TensorProtocol:
    if tensor.dtype != ir.DataType.FLOAT:
        return tensor
    values = tensor.numpy()
    with np.errstate(over="ignore"):
        narrow = values.astype(kind.numpy())
    if not np.array_equal(np.isfinite(values), np.isfinite(narrow.astype(np.float32))):
        raise OnnxGraphError(
            f"{source} is to be in half precision, which cannot hold {np.abs(values).max():.3g} "
            f"({tensor.name!r}); export the original in float32, compress that, and convert it then "
            "(onnxruntime.transformers.float16.convert_float_to_float16)"
        )
    return ir.tensor(narrow, name=tensor.name)
