"""Files in half precision: fitted in float32, handed back in the precision that each value had.

What is compressed is the same graph in float32, behind inputs of the file's own types. Every value keeps its
name, so a changed graph finds its way back: what has a known name gets its old type, what is new that of the
values which it is computed from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from decomposition import CompressionPlan, PlanError, Quantise
from rankrl.errors import ConfigError
from rankrl.onnx.export.operators import is_standard
from rankrl.onnx.export.values import with_subgraphs
from rankrl.onnx.graph.errors import OnnxGraphError

log = logging.getLogger(__name__)

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPES = frozenset(("to", "dtype", "output_dtype", "stash_type", "softmax_precision"))
"""Attributes that name a type."""
_NO_INTEGERS = (
    "a file in half precision is handed back in half precision, which integers do not go with; export it in "
    "float32 for them"
)
_WIDENED = "rankrl_float32_"
_MEAN, _VARIANCE = 3, 4


@dataclass(frozen=True)
class HalfValues:
    """What of a graph was in half precision.

    Attributes:
        types: The types of values in half precision, by name.
        names: The names of all values.
        attributes: Attributes that named a type of half precision, by the node's first output and their own
            name.
    """

    types: Mapping[str, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.types)


def half_values(model: onnx.ModelProto) -> HalfValues:
    """Find what of a model is in half precision.

    Args:
        model: The model, without functions of its own.
    """
    types: dict[str, int] = {}
    names: set[str] = set()
    attributes: dict[tuple[str, str], int] = {}
    for graph in with_subgraphs(shape_inference.infer_shapes(model).graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            names.update(node.output)
            known = [types[name] for name in node.input if name in types]
            guess = next((kind for kind in known if kind in HALF), 0)
            for name in node.output:  # of foreign operators nothing is inferred
                if not types.get(name):
                    types[name] = guess
            for each in node.attribute:
                if is_standard(node) and each.name in _TYPES and each.i in HALF:
                    attributes[node.output[0], each.name] = each.i
    return HalfValues(
        {name: kind for name, kind in types.items() if kind in HALF},
        frozenset(names | types.keys()),
        attributes,
    )


def in_float32(model: onnx.ModelProto, half: HalfValues) -> onnx.ModelProto:
    """Return a model with everything in float32 that is in half precision, but for its inputs.

    Args:
        model: The model; left as it was.
        half: What is in half precision (`half_values`).
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for graph in with_subgraphs(wide.graph):
        for tensor in graph.initializer:
            _widen(tensor)
        for value in (*graph.value_info, *graph.output, *(graph.input if graph is not wide.graph else ())):
            if value.name in half.types:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for node in graph.node:
            for each in node.attribute:
                if each.type == AttributeProto.TENSOR:
                    _widen(each.t)
                elif (node.output[0], each.name) in half.attributes:
                    each.i = TensorProto.FLOAT
    casts = {
        entry.name: helper.make_node(
            "Cast", [entry.name], [f"{_WIDENED}{entry.name}"], f"{_WIDENED}{entry.name}", to=TensorProto.FLOAT
        )
        for entry in wide.graph.input
        if entry.name in half.types
    }
    _rename(wide.graph, {name: str(node.output[0]) for name, node in casts.items()})
    for node in reversed(list(casts.values())):
        wide.graph.node.insert(0, node)
    return wide


def in_half(model: onnx.ModelProto, half: HalfValues, source: str) -> onnx.ModelProto:
    """Return a model that `in_float32` made, changed perhaps, in the precision that the original had.

    Args:
        model: The model; left as it was.
        half: What was in half precision.
        source: Where it is from, for messages.

    Raises:
        OnnxGraphError: A number is too large for half precision.
    """
    narrow = onnx.ModelProto()
    narrow.CopyFrom(model)
    graph = narrow.graph
    casts = [node for node in graph.node if node.name.startswith(_WIDENED) and is_standard(node, "Cast")]
    for node in casts:
        graph.node.remove(node)
    _rename(graph, {str(node.output[0]): str(node.input[0]) for node in casts})
    types = _types_of_new(graph, half)
    for each in with_subgraphs(graph):
        for tensor in each.initializer:
            if tensor.name in types and tensor.data_type == TensorProto.FLOAT:
                _narrow(tensor, types[tensor.name], source)
        for value in (*each.input, *each.value_info, *each.output):
            if value.name in types:
                value.type.tensor_type.elem_type = types[value.name]
        for node in each.node:
            for attribute in node.attribute:
                key = (node.output[0], attribute.name)
                if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
                    if node.output[0] in types and node.op_type in ("Constant", "ConstantOfShape"):
                        _narrow(attribute.t, types[node.output[0]], source)
                elif key in half.attributes:
                    attribute.i = half.attributes[key]
    return narrow


def without_integers(precisions: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the precisions that nodes of a file in half precision may choose from, with a warning if fewer.

    Raises:
        ConfigError: Nothing but integers is wanted.
    """
    if "float32" not in precisions:
        raise ConfigError(f"{source}: {_NO_INTEGERS}")
    if len(precisions) > 1:
        log.warning("%s: %s; precisions=float32 alone is taken", source, _NO_INTEGERS)
    return ("float32",)


def check_without_integers(plan: CompressionPlan, source: str) -> None:
    """Refuse a plan that rounds nodes of a file in half precision.

    Raises:
        PlanError: It does.
    """
    rounded = [layer.name for layer in plan if layer.operation(Quantise) is not None]
    if rounded:
        raise PlanError(f"the plan rounds {rounded[0]!r} of {source} to integers; {_NO_INTEGERS}")


def _types_of_new(graph: onnx.GraphProto, half: HalfValues) -> dict[str, int]:
    """Return the types of all values in half precision, of new ones too."""
    types = dict(half.types)
    for each in with_subgraphs(graph):
        for node in each.node:
            kind = _kind(node, types)
            for name in node.output:
                if kind and name not in half.names:
                    types[name] = kind
    constants = {tensor.name for each in with_subgraphs(graph) for tensor in each.initializer}
    for each in with_subgraphs(graph):
        for node in each.node:
            kind = types.get(node.output[0], 0) or _kind(node, types)
            for position, name in enumerate(node.input):
                if name not in constants or name in half.names:
                    continue
                beside = node.input[_VARIANCE] if _is_mean(node, position) else None
                wanted = kind if beside is None else types.get(beside, 0)
                if wanted:
                    types[name] = wanted
    return types


def _is_mean(node: NodeProto, position: int) -> bool:
    """Tell whether an input is the mean of a batch normalisation, which has the type of its variance."""
    return is_standard(node, "BatchNormalization") and position == _MEAN


def _kind(node: NodeProto, types: Mapping[str, int]) -> int:
    """Return the type in half precision that a node computes in by its first input, 0 for none."""
    return next((types[name] for name in node.input[:1] if name in types), 0)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Let nodes read other values, in bodies too."""
    for each in with_subgraphs(graph):
        for node in each.node:
            node.input[:] = [names.get(name, name) for name in node.input]


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in HALF:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _narrow(tensor: TensorProto, kind: int, source: str) -> None:
    values = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        narrow = values.astype(helper.tensor_dtype_to_np_dtype(kind))
    if not np.array_equal(np.isfinite(values), np.isfinite(narrow.astype(np.float32))):
        raise OnnxGraphError(
            f"{source} is to be in half precision, which cannot hold {np.abs(values).max():.3g} "
            f"({tensor.name!r}); export the original in float32, compress that, and convert it then "
            "(onnxruntime.transformers.float16.convert_float_to_float16)"
        )
    tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))
