"""What is done to the ONNX graph after tracing: folding, names, preprocessing, metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rankrl.data import Preprocessing
from rankrl.onnx.export.operators import is_standard
from rankrl.onnx.export.values import names_in, new_name, rename_values, uses, with_subgraphs

if TYPE_CHECKING:  # onnxscript brings SymPy along, which takes half a second
    from onnxscript import ir

BATCH_AXIS = "batch"
"""What the free batch size is called in the file; runtimes and viewers show it."""
_SMALL = 256
"""Elements that a folded constant may always have: shapes, axes, short vectors."""


def simplify(model: ir.Model, *, fold_batchnorm: bool) -> onnx.ModelProto:
    """Fold constants and batch normalisations, and remove what the exporter left over.

    No weight is contracted where the product is larger than its factors: a compressed model stays small.

    Args:
        model: The exporter's graph; changed in place.
        fold_batchnorm: Whether to fold batch normalisations into the convolution or linear layer before them.

    Returns:
        The model as protobuf, without the exporter's notes (stack traces with the paths of source files).
    """
    from onnxscript import ir, optimizer

    turned = {
        str(node.outputs[0].name): str(node.inputs[0].name)
        for node in model.graph
        if is_standard(node, "Transpose") and node.inputs[0] is not None and node.inputs[0].is_initializer()
    }
    if fold_batchnorm:
        optimizer.optimize_ir(model, should_fold=_should_fold)
    else:  # the optimizer's rewrite rules would fold them
        optimizer.inline(model)
        optimizer.fold_constants_ir(model, should_fold=_should_fold)
        optimizer.remove_unused_nodes(model)
    proto = ir.to_proto(model)
    if fold_batchnorm:
        fold_batchnorm_into_computed_weights(proto.graph)
    _name_turned_weights(proto.graph, turned)
    _remove_notes(proto)
    return proto


def _name_turned_weights(graph: onnx.GraphProto, turned: Mapping[str, str]) -> None:
    """Call weights that were transposed on the way into the graph what the network calls them.

    Linear layers over sequences are matrix products with the transposed weight, which the exporter folds into
    a constant without a name of its own.

    Args:
        graph: The graph; changed in place.
        turned: Name of the weight by that of the transposed one.
    """
    constants = {tensor.name for tensor in graph.initializer}
    named = {new: old for new, old in turned.items() if new in constants and old not in constants}
    if len(set(named.values())) == len(named):
        rename_values(graph, named)


def fold_batchnorm_into_computed_weights(graph: onnx.GraphProto) -> None:
    """Fold batch normalisation into convolutions whose weight is itself computed in the graph (from cores).

    With s = γ / √(σ² + ε), BN(W ∗ x + b) = (s W) ∗ x + s (b − μ) + β (Ioffe and Szegedy 2015, algorithm 2).
    The product s W is a `Mul` of the computed weight: constant too, hence evaluated once, on loading.

    Args:
        graph: The graph; changed in place. A batch normalisation that does not follow a convolution, or
            follows one whose output is used elsewhere too, stays.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    counts, taken = uses(graph), names_in(graph)
    for batchnorm in [node for node in graph.node if is_standard(node, "BatchNormalization")]:
        conv = producers.get(batchnorm.input[0])
        if conv is None or not is_standard(conv, "Conv") or counts[conv.output[0]] > 1:
            continue
        kernel = next((a.ints for a in conv.attribute if a.name == "kernel_shape"), None)
        bias = conv.input[2] if len(conv.input) > 2 else ""
        operands = [*batchnorm.input[1:], *filter(None, [bias])]
        if kernel is None or any(name not in constants for name in operands):
            continue
        gamma, beta, mean, variance = (
            numpy_helper.to_array(constants[name]).astype(np.float64) for name in batchnorm.input[1:]
        )
        epsilon = next((a.f for a in batchnorm.attribute if a.name == "epsilon"), 1e-5)
        scale = gamma / np.sqrt(variance + epsilon)
        old_bias = numpy_helper.to_array(constants[bias]).astype(np.float64) if bias else np.zeros_like(mean)
        name = batchnorm.output[0]
        weight, factor, constant, node = (
            new_name(f"{name}_{kind}", taken) for kind in ("weight", "scale", "bias", "scaled_weight")
        )
        folded = {
            factor: scale.reshape(-1, *[1] * (len(kernel) + 1)),
            constant: (old_bias - mean) * scale + beta,
        }
        graph.initializer.extend(
            numpy_helper.from_array(value.astype(np.float32), key) for key, value in folded.items()
        )
        scaled = helper.make_node("Mul", [conv.input[1], factor], [weight], node)
        graph.node.insert(list(graph.node).index(conv), scaled)
        conv.input[:] = [conv.input[0], weight, constant]
        conv.output[0] = name
        graph.node.remove(batchnorm)
    remove_unused_constants(graph)


def name_batch_axis(graph: onnx.GraphProto) -> None:
    """Call the first axis of the input `batch`, and sizes that follow from it after it (`2*batch`).

    The exporter writes the symbol that tracing made up, such as `s77`.

    Args:
        graph: The graph; changed in place. One with a fixed batch size stays as it is.
    """
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    if not symbol:
        return
    occurrence = re.compile(rf"\b{re.escape(symbol)}\b")
    for each in with_subgraphs(graph):
        for value in (*each.input, *each.output, *each.value_info):
            for axis in value.type.tensor_type.shape.dim:
                if axis.dim_param:
                    axis.dim_param = occurrence.sub(BATCH_AXIS, axis.dim_param)


def name_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Give a graph's outputs names, unless inputs or constants have them; other values make way.

    Args:
        graph: Changed in place.
        names: Different names, one for each output.
    """
    fixed = {each.name for each in (*graph.input, *graph.initializer)}
    outputs = [output.name for output in graph.output]
    if fixed & set(names):
        return
    taken = names_in(graph) | set(names)
    others = {name: new_name(name, taken) for name in set(names) - set(outputs)}
    for each in with_subgraphs(graph):
        rename_values(each, others)
    rename_values(graph, dict(zip(outputs, names, strict=True)))


def take_bytes(graph: onnx.GraphProto, preprocessing: Preprocessing) -> None:
    """Let the graph take images as bytes, (N, height, width, channels), and normalise them itself.

    The normalisation is not folded into the first convolution: that pads with zeros after it, so a mean in
    its bias would be wrong along the border.

    Args:
        graph: A graph whose only input is normalised images, (N, channels, height, width); changed in place.
        preprocessing: What is done to the images.
    """
    entry = graph.input[0]
    taken = names_in(graph)
    stages = [
        new_name(f"{entry.name}_{stage}", taken) for stage in ("planes", "float", "scaled", "normalised")
    ]
    for each in with_subgraphs(graph):
        for node in each.node:
            for position, name in enumerate(node.input):
                if name == entry.name:
                    node.input[position] = stages[-1]
    constants = {}
    for kind, values in zip(("scale", "offset"), preprocessing.scale_and_offset(), strict=True):
        constants[kind] = new_name(f"{entry.name}_{kind}", taken)
        graph.initializer.append(numpy_helper.from_array(values.view(-1, 1, 1).numpy(), constants[kind]))
    nodes = [
        helper.make_node("Transpose", [entry.name], [stages[0]], perm=(0, 3, 1, 2)),
        helper.make_node("Cast", [stages[0]], [stages[1]], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [stages[1], constants["scale"]], [stages[2]]),
        helper.make_node("Add", [stages[2], constants["offset"]], [stages[3]]),
    ]
    for position, node in enumerate(nodes):
        graph.node.insert(position, node)
    axis = entry.type.tensor_type.shape.dim[0]
    batch: str | int = axis.dim_param or axis.dim_value
    shape = (batch, preprocessing.height, preprocessing.width, preprocessing.channels)
    entry.type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.UINT8, shape))


def set_metadata(proto: onnx.ModelProto, metadata: Mapping[str, str]) -> None:
    """Store text in the model's `metadata_props`, where any ONNX tool can read it."""
    helper.set_model_props(proto, dict(metadata))


def _should_fold(node: ir.Node) -> bool | None:
    """Refuse to fold a node whose result takes more room than its operands; None leaves it to the optimizer.

    The cores of a decomposed layer thus stay cores in the file; the runtime contracts them once, on loading.
    """
    if is_standard(
        node, "Expand"
    ):  # a bias of zeros; computed, it would keep a batch normalisation from folding
        return None
    operands = sum(value.const_value.size for value in node.inputs if value and value.const_value is not None)
    for output in node.outputs:
        shape = output.shape
        if shape is not None and shape.is_static() and math.prod(shape.numpy()) > max(operands, _SMALL):
            return False
    return None


def remove_unused_constants(graph: onnx.GraphProto) -> None:
    """Remove constants that nothing reads any more, and what is known of tensors that nothing makes."""
    used = {name for each in with_subgraphs(graph) for node in each.node for name in node.input}
    used |= {output.name for each in with_subgraphs(graph) for output in each.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    made = {name for node in graph.node for name in node.output}
    shapes = [value for value in graph.value_info if value.name in made]
    del graph.initializer[:], graph.value_info[:]
    graph.initializer.extend(kept)
    graph.value_info.extend(shapes)


def _remove_notes(proto: onnx.ModelProto) -> None:
    """Remove stack traces and tracing notes: they hold source paths and can outweigh a small model."""
    graph = proto.graph
    for item in (
        proto,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
