"""Write ONNX files atomically, after onnx's checker and onnxruntime accept them."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as MissingKernel
from torch import Tensor, nn

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
    tensors_of,
)
from decomposition.progress import Progress, progress_bar
from rankrl.data import Preprocessing
from rankrl.errors import DefectError, ExportError
from rankrl.files import write_atomically
from rankrl.onnx.export.graph_passes import (
    convolve_subsampling,
    name_axes,
    name_values,
    pad_channels,
    simplify,
    take_bytes,
)
from rankrl.onnx.export.tracing import convert, inference_copy, input_names, plain_names, trace
from rankrl.onnx.graph_edits import opset_of
from rankrl.onnx.protobuf import load_model, to_proto
from rankrl.onnx.runtimes import inference_session
from rankrl.options.timing import LatencyOptions
from rankrl.verbs import verb

log = logging.getLogger(__name__)


def write_checked(
    model: ir.Model | onnx.ModelProto, path: str | Path, what: str, *, full_check: bool = False
) -> int:
    """Write a file if ONNX's checker accepts it and onnxruntime, if it can, loads it; return its size."""
    proto = to_proto(model) if isinstance(model, ir.Model) else model
    try:
        data = proto.SerializeToString()
    except Exception as error:  # ValueError or protobuf's own, by its version
        raise ExportError(
            f"cannot write {what} as one ONNX file: {error}. A model of 2 GiB or more does not fit into one."
        ) from error
    try:
        onnx.checker.check_model(proto, full_check=full_check)
        inference_session(data, 1)
    except MissingKernel:
        pass
    except Exception as error:  # neither onnx's errors nor onnxruntime's have a base of their own
        raise DefectError(
            f"{what} is damaged, so nothing was written to {path}: {error}. This is a fault of "
            "rankrl's, not of your network or options: please report it with the command, the original file "
            f"and the versions, onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"
        ) from error
    write_atomically(path, data)
    return len(data)


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
