"""Names of a file's inputs, outputs and free axes that the user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
from torch import nn

from decomposition.network.inputs import Inputs, tensors_of
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.checked_file import write_checked
from rankrl.onnx.export.feeds import input_names, plain_names
from rankrl.onnx.export.graph import name_values
from rankrl.onnx.protobuf import load_model
from rankrl.options.timing import LatencyOptions

BATCH_AXIS = "batch"
"""What the free batch size is called in the file; runtimes and viewers show it."""

AxisNames = Mapping[str, Mapping[int, str]]
"""Names of the free axes of each input, by their position."""


def name_ends(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give a graph's inputs and outputs the names that the user wants; none leaves those that they have."""
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
    """Do what `name_ends` does, to a finished file; verified and timed, it computes the same."""
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
    """Return what inputs are called: as the forward's parameters, of a single one if no output has that."""
    names = input_names(network, batch)
    return plain_names(1) if len(names) == 1 and set(names) & set(outputs) else names
