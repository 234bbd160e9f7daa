"""Export networks as ONNX files, with the integers of their plans.

A compressed network is exported without rounding; then weights are stored in integers, and onnxruntime's
quantiser writes the integer nodes that the plan names.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxruntime.quantization.quant_utils import compute_scale_zp, quantize_onnx_initializer
from torch import Tensor, nn

from decomposition import integer_layers, rounded_parameters, without_rounding
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import (
    ExampleInputs,
    Inputs,
    InputShape,
    InputSpec,
    Place,
    as_inputs,
    count_inputs,
    described,
    example_batch,
    holds_tensors,
    input_shape_of,
    joined,
    leaves,
    mapped,
    run_model,
    tensors_of,
)
from decomposition.network.layers import is_decomposable_module
from decomposition.network.rounding import REDUCED_BITS, largest_integer
from decomposition.network.surgery import copied
from decomposition.progress import Progress, progress_bar
from decomposition.rewrites import PlainTransposed
from rankrl.data import Preprocessing
from rankrl.errors import ExportError
from rankrl.onnx.export.graph_passes import (
    convolve_subsampling,
    name_axes,
    name_values,
    pad_channels,
    simplify,
    take_bytes,
)
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.static_quantiser import as_in_file, integer_bits
from rankrl.onnx.export.tracing import convert, inference_copy, input_names, plain_names, trace
from rankrl.onnx.graph_edits import (
    Array,
    add_constant,
    is_standard,
    names_in,
    new_name,
    node_of,
    opset_of,
    put_first,
)
from rankrl.onnx.protobuf import load_model, save_model, write_checked
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, open_session
from rankrl.options.timing import LatencyOptions
from rankrl.verbs import verb

log = logging.getLogger(__name__)


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass
class FileOutputs:
    """Names of a file's outputs, and outputs of the network that it lacks; set when the network has run."""

    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def output_names(places: Sequence[Place]) -> list[str]:
    """Return the names of a file's outputs, made from their places in what the forward returns."""
    names = ["_".join(map(str, place)) for place in places]
    if len(set(names)) == len(names) and all(map(_NAME.fullmatch, names)):
        return names
    return ["output"] if len(names) == 1 else [f"output_{index}" for index in range(len(names))]


def return_tensors_alone(network: nn.Module) -> FileOutputs:
    """Hook a network so that it returns only the tensors of its output, as an ONNX file can."""
    outputs = FileOutputs()

    def reduce(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        parts = list(leaves(output))
        tensors = [(place, leaf) for place, leaf in parts if isinstance(leaf, Tensor)]
        if not tensors:
            raise ExportError(f"{type(module).__name__} returns no tensor, but a {type(output).__name__}")
        others = {  # a torch.Size, a tuple of numbers, is listed once
            place[:1]: f"{place[0] if place else 'itself'} ({type(leaf).__name__})"
            for place, leaf in reversed(parts)
            if leaf is not None and not isinstance(leaf, Tensor)
        }
        outputs.left_out = list(others.values())[::-1]
        outputs.names = output_names([place for place, _ in tensors])
        seen = {id(leaf) for _, leaf in leaves((arguments, keywords))}
        returned = []
        for _, tensor in tensors:  # a file's output has one name: twice the same, or an input, is copied
            returned.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return tuple(returned) if len(returned) > 1 else returned[0]

    network.register_forward_hook(reduce, with_kwargs=True)
    return outputs


@functools.cache
def say_left_out(model: str, others: tuple[str, ...]) -> None:
    """Warn of outputs that a file does not have, once: a budget in time exports a network many times."""
    if others:
        log.warning("the ONNX file of %s returns tensors alone, not %s", model, ", ".join(others))


BATCH_AXIS = "batch"
"""Name of the free batch size in the file; runtimes and viewers show it."""

AxisNames = Mapping[str, Mapping[int, str]]
"""Names of the free axes of each input, by their position."""


def name_ends(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename a graph's inputs and outputs; an empty list leaves their names as they are."""
    for what, values, names in (("input", graph.inputs, inputs), ("output", graph.outputs, outputs)):
        if not names:
            continue
        present = [value.name for value in values]
        if len(present) != len(names) or not name_values(graph, values, names):
            raise ExportError(
                f"{what}_names={list(names)} cannot be given to the {what}s of the ONNX file, {present}: "
                "give as many, and none that a weight, or an input or output of the other side, has"
            )


def check_names(path: Path, options: LatencyOptions) -> None:
    """Refuse names that the inputs and outputs of a file cannot have, as `name_ends` does."""
    if options.input_names or options.output_names:
        name_ends(load_model(path).graph, options.input_names, options.output_names)


def name_file(path: Path, options: LatencyOptions) -> None:
    """Rename the inputs and outputs of a finished file (`name_ends`)."""
    if options.input_names or options.output_names:
        model = load_model(path)
        name_ends(model.graph, options.input_names, options.output_names)
        write_checked(model, path, f"the renamed file {path.name}")


def checked_axes(
    network: nn.Module, batch: Inputs, named: AxisNames | None, *, dynamic_batch: bool
) -> list[dict[int, str]]:
    """Return the names of the free axes of each input, the batch's among them."""
    names, tensors = input_names(network, batch), tensors_of(batch)
    unknown = sorted(set(named or {}) - set(names))
    if unknown:
        raise ExportError(
            f"dynamic_axes names the input {unknown[0]!r}; the forward takes {', '.join(names)}"
        )
    result = []
    for name, tensor in zip(names, tensors, strict=True):
        axes = {0: BATCH_AXIS} if dynamic_batch else {}
        axes |= (named or {}).get(name, {})
        wrong = [axis for axis in axes if axis not in range(tensor.ndim) or not (axis or dynamic_batch)]
        if wrong:
            raise ExportError(
                f"dynamic_axes has the axis {wrong[0]} of {name!r}, which has {tensor.ndim}, from 0; leave "
                "dynamic_batch on for axis 0"
            )
        result.append(axes)
    return result


def default_names(network: nn.Module, batch: Inputs, outputs: Sequence[str]) -> list[str]:
    """Return the default input names: the forward's parameters, unless an output has a single one's name."""
    names = input_names(network, batch)
    return plain_names(1) if len(names) == 1 and set(names) & set(outputs) else names


OLDEST_OPSET = 18
"""The oldest operator set that torch's exporter translates to without a down-conversion."""
_STEPS = 4  # tracing, translation, simplification, the file
PREPROCESSING_KEY = "preprocessing"
"""The metadata that says what goes into the file, as JSON (`Preprocessing.to_dict`)."""


@dataclass(frozen=True)
class ExportResult:
    """Path, bytes, operator set and operator counts of a written ONNX file."""

    path: Path
    file_bytes: int
    opset: int
    operators: Mapping[str, int]


@verb()
def export_onnx(
    model: nn.Module,
    path: str | Path,
    input_shape: ExampleInputs,
    *,
    sample: ExampleInputs | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
    fold_batchnorm: bool = True,
    dynamic_batch: bool = True,
    dynamic_axes: AxisNames | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
    channel_block: int = 1,
    keep: Collection[str] = (),
    progress: Progress = None,
) -> ExportResult:
    """Write a model as one self-contained ONNX file that `onnx.checker` accepts and onnxruntime loads.

    The file computes what the model computes in evaluation mode and float32. Decomposed layers keep their
    cores: a runtime contracts them once, when it loads the file. Shortcuts that only subsample and add
    channels of zeros become convolutions (`onnx.export.graph_passes`). The file appears complete or not at
    all.

    Args:
        model: Any module; it is not changed.
        path: The file to write.
        input_shape: Shape of one input without the batch, e.g. (3, 32, 32); or a batch of inputs to trace
            with: a tensor, a tuple of tensors that the forward takes in order, or a dict of those it takes by
            name.
        sample: A batch of inputs to trace with where a shape is given and zeros will not do (a model that
            checks its input).
        opset: Version of the ONNX operator set, at least 18; None for the default of torch's exporter.
        metadata: Text to store in the file, e.g. the plan and the metrics as JSON.
        fold_batchnorm: Fold every batch normalisation that follows a convolution or linear layer into it.
        dynamic_batch: Leave the batch size free. Otherwise it is the sample's (1 without a sample).
        dynamic_axes: Other axes to leave free, with names, by the forward's parameter: `{"images": {2:
            "height", 3: "width"}}`.
        input_names: Names of the file's inputs; by default those of the forward's parameters.
        output_names: What it calls its outputs; by default by the keys or fields that the forward returns
            them under, else `output`.
        preprocessing: What is done to images of bytes before the model. With it the file does that itself:
            it takes uint8 of shape (N, height, width, channels), and its metadata says so under
            `preprocessing`. Without it the file takes what the model takes.
        channel_block: Fill up fewer channels than that to so many when the file is loaded, where onnxruntime
            is faster then (`rankrl.onnx.export.graph_passes`); `rankrl.device.channel_block()` is what it
            computes at a time here, 1 leaves all as it is.
        keep: Names of parameters that stay constants of the graph as they are. Others may be reshaped or
            transposed once and for all, and take other names.
        progress: Where progress goes: None draws a bar on a terminal, False shows nothing; a function is
            called with "export", the number of steps that are done and the number of all.

    Returns:
        Where the file is, how large it is, and what it is made of.

    Raises:
        ExportError: The model cannot be traced or translated (the layer is named), the options contradict one
            another, or it does not fit into one file.
        DecompositionError: A tensor of the model has no values: a lazy layer's, or one on the device `meta`.
        DefectError: The graph is damaged, by no fault of the user's.
        StorageError: The file cannot be written.
    """
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not OLDEST_OPSET <= opset <= newest:
        raise ExportError(
            f"opset is {opset}; it must lie between {OLDEST_OPSET} and {newest}, or be left out."
        )
    if metadata and not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ExportError("metadata must map strings to strings; write other values as JSON text first.")
    if preprocessing is not None:
        if dynamic_axes:
            raise ExportError("dynamic_axes and preprocessing exclude one another: images have one size")
        preprocessing = replace(preprocessing, in_graph=False)
        shape = input_shape_of(input_shape)
        if shape != preprocessing.input_shape:
            raise ExportError(
                f"preprocessing is for inputs of shape {preprocessing.input_shape}, the model's is "
                f"{shape}; give the preprocessing of the images that the model was trained on."
            )
    with progress_bar("export", _STEPS, progress=progress) as bar:
        network = inference_copy(model)
        name = type(network).__name__
        batch = _sample_batch(network, input_shape, sample, 2 if dynamic_batch else 1)
        outputs = return_tensors_alone(network)
        axes = checked_axes(network, batch, dynamic_axes, dynamic_batch=dynamic_batch)
        program = trace(network, batch, axes)
        say_left_out(name, tuple(outputs.left_out))
        bar.advance()
        translated = convert(program, name, opset, inputs=plain_names(len(axes)))
        bar.advance()
        simplify(translated, fold_batchnorm=fold_batchnorm, keep=keep)
        bar.advance()
        graph = translated.graph
        name_axes(graph, axes)
        name_values(graph, graph.inputs, default_names(network, batch, outputs.names))
        name_values(graph, graph.outputs, outputs.names)
        name_ends(graph, input_names, output_names)
        convolve_subsampling(translated)
        translated.metadata_props.update(metadata or {})
        if preprocessing is not None:
            take_bytes(graph, preprocessing)
            notes = json.dumps(replace(preprocessing, in_graph=True).to_dict())
            translated.metadata_props[PREPROCESSING_KEY] = notes
        pad_channels(translated, channel_block)
        size = write_checked(translated, path, f"the ONNX graph of {name}", full_check=True)
        bar.advance()
    return ExportResult(
        path=Path(path),
        file_bytes=size,
        opset=opset_of(translated),
        operators=dict(Counter(node.op_type for node in graph)),
    )


def _sample_batch(
    model: nn.Module, input_shape: ExampleInputs, sample: ExampleInputs | None, least: int
) -> Inputs:
    """Return a batch of at least `least` inputs to trace with; two keep the batch size free."""
    shape = input_shape_of(input_shape)
    if sample is None and not holds_tensors(input_shape):
        return example_batch(model, shape, least)
    batch = as_inputs(input_shape if sample is None else sample)
    sizes, needed = (_sizes(input_shape_of(batch_or_shape)) for batch_or_shape in (batch, shape))
    if sizes != needed or count_inputs(batch) == 0:
        raise ExportError(
            f"sample has the {described(batch)}; without its first axis, of at least 1, it must have the "
            f"shape {', '.join(map(str, needed))}."
        )
    batch = mapped(lambda x: x.detach().cpu().float() if x.is_floating_point() else x.detach().cpu(), batch)
    return joined([batch] * least) if count_inputs(batch) < least else batch


def _sizes(shape: InputShape) -> list[tuple[int, ...]]:
    return [spec.shape for spec in shape.tensors] if isinstance(shape, InputSpec) else [shape]


INT4_OPSET = 21
"""The first operator set in which DequantizeLinear takes INT4."""


def export_network(
    network: nn.Module,
    path: Path,
    input_shape: ExampleInputs,
    inputs: Iterable[Batch],
    *,
    opset: int | None = None,
    channel_block: int = 1,
    reduce_range: bool | None = None,
    **options: Any,
) -> ExportResult:
    """Export a network as one ONNX file, quantised as its plan says."""
    network = as_in_file(network, reduce_range)
    computing = {f"{name}.weight" for name in integer_layers(network)}
    stored = {name: bits for name, bits in rounded_parameters(network).items() if name not in computing}
    if 4 in stored.values():
        if opset is not None and opset < INT4_OPSET:
            raise ExportError(f"opset is {opset}; weights of 4 bits need {INT4_OPSET} or newer (or null).")
        opset = max(opset or 0, INT4_OPSET)
    if not (computing or stored):
        options |= {"opset": opset, "channel_block": channel_block, "progress": False}
        return export_onnx(network, path, input_shape, **options)
    with tempfile.TemporaryDirectory() as folder:  # the float32 file is never seen under the other's name
        scratch = Path(folder) / "network.onnx"
        plain = without_rounding(copied(network))
        modules = dict(plain.named_modules())

        def reshaped(weight: str) -> bool:
            layer, _, _ = weight.rpartition(".")
            whole = modules[layer.rpartition(".")[0]]
            return isinstance(whole, PlainTransposed) or not is_decomposable_module(modules[layer])

        keep = list(filter(reshaped, stored))
        written = export_onnx(plain, scratch, input_shape, opset=opset, keep=keep, progress=False, **options)
        if stored:
            model = load_model(scratch)
            store_integers(model, stored)
            save_model(model, scratch)
        if computing:
            reduced = REDUCED_BITS in integer_bits(network)
            quantise_onnx(scratch, scratch, inputs, weights=computing, reduce_range=reduced)
        model = load_model(scratch)
        pad_channels(model, channel_block)
        size = write_checked(model, path, f"the file of {type(network).__name__}")
    return replace(written, path=path, file_bytes=size)


def store_integers(model: ir.Model, bits: Mapping[str, int]) -> None:
    """Store weights of a float32 graph in integers, one scale an output channel."""
    graph, taken = model.graph, names_in(model.graph)
    missing = sorted(set(bits) - set(graph.initializers))
    if missing:
        raise ExportError(
            f"the weight {missing[0]!r} is no constant of the graph, so it cannot be stored in integers; "
            "leave its layer without Quantise"
        )
    for name, width in bits.items():
        weight = graph.initializers[name]
        last = any(is_standard(node, "MatMul") and index == 1 for node, index in weight.uses())
        tensor = weight.const_value
        assert tensor is not None
        axis = len(tensor.shape) - 1 if last else 0
        integers, scale = rounded_tensor(tensor, width, axis)
        integers.name, factor, back = (
            new_name(f"{name}_{kind}", taken) for kind in ("integers", "scale", "DequantizeLinear")
        )
        rounded = ir.val(integers.name, const_value=integers)
        node = node_of(
            "DequantizeLinear", [rounded, add_constant(graph, factor, scale)], back, {"axis": axis}
        )
        node.outputs[0].name = name
        weight.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        del graph.initializers[name]
        graph.register_initializer(rounded)
        put_first(graph, [node])


def rounded_tensor(tensor: ir.TensorProtocol, width: int, axis: int) -> tuple[ir.TensorProtocol, Array]:
    """Return a weight in integers of 8, 7 or 4 bits, and its scales, one for each index of an axis."""
    values = np.moveaxis(tensor.numpy(), axis, 0)
    kind, largest = ir.DataType.INT4 if width == 4 else ir.DataType.INT8, largest_integer(width)
    rows = np.abs(values.reshape(len(values), -1)).max(1)
    ends = np.array([-largest, largest], dtype=np.int8)
    pairs = [
        compute_scale_zp(-largest_weight, largest_weight, *ends, symmetric=True) for largest_weight in rows
    ]
    scale = np.array([step for _, step in pairs], dtype=np.float32).reshape(-1)
    scale[rows == 0] = 1.0
    zero = np.zeros(len(values), dtype=np.int8)
    integers = quantize_onnx_initializer(ir.to_proto(tensor), kind.value, zero, scale, axis=axis)
    return ir.from_proto(integers), scale


def class_agreement(
    network: nn.Module,
    path: Path,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    runtime: str = DEFAULT_RUNTIME,
) -> float:
    """Return the fraction of inputs on which an ONNX file and its network predict the same class."""
    session = open_session(path, runtime=runtime)
    same = total = 0
    with evaluation_mode(network), torch.no_grad():
        for images, arrays in pairs:
            expected = np.asarray(run_model(network, images).argmax(1))
            same += int((session.run(arrays.numpy())[0].argmax(1) == expected).sum())
            total += len(images)
    if total == 0:
        raise ExportError("there are no images to compare the ONNX file with its network on.")
    return same / total
