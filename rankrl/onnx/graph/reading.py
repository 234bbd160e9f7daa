"""Reading a network from an ONNX file: checks, repairs and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx import inliner, version_converter
from onnx_ir.passes import common as passes

from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.channel_padding import unpad_channels
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph_edits import values_in
from rankrl.onnx.operators import STANDARD, opset_of
from rankrl.onnx.protobuf import to_proto
from rankrl.onnx.set_aside import SetAside, set_aside_outputs
from rankrl.onnx.sparse import store_densely

LEAST_OPSET = 13
_LEAST_IR = 7
"""The version of ONNX's files that came with that operator set."""
_CONSTANTS_APART = 4
"""The version of ONNX's files since which constants need not be inputs."""
_LARGEST_FILE = 2**31 - 1
"""Bytes that one protobuf message can hold, in which onnxruntime is handed changed graphs."""


def read_graph(path: Path) -> tuple[ir.Model, str, SetAside]:
    """Read a file, with the data that lie next to it, and check it."""
    proto = _read(path)
    model, aside = _checked(proto, path)
    if passes.RemoveInitializersFromInputsPass()(model).modified:  # old files list them, others cannot go
        model.ir_version = max(model.ir_version, _CONSTANTS_APART)
    free_sizes(model.graph)
    opset, converted = opset_of(model), ""
    if opset < LEAST_OPSET:
        model = _converted(model, path, opset)
        converted = f"onnx's version converter took it from operator set {opset} to {LEAST_OPSET}"
    unpad_channels(model)
    _name_nodes(model)
    return model, converted, aside


def _read(path: Path) -> onnx.ModelProto:
    """Return what a file and those next to it hold, unchecked."""
    if not path.is_file():
        raise OnnxGraphError(f"there is no ONNX file at {path}; check the path (model.path=FILE)")
    try:
        proto = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise OnnxGraphError(
            f"{path} is no ONNX file, or one that is cut off ({error}); fetch or export it again"
        ) from error
    if not proto.graph.node or not any(opset.domain in STANDARD for opset in proto.opset_import):
        raise OnnxGraphError(
            f"{path} is no ONNX file, or one that is cut off (no graph in it); fetch or export it again"
        )
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise OnnxGraphError(
            f"{path} keeps weights in a file next to it that cannot be read ({error}); put that file into "
            f"the folder {path.parent}"
        ) from error
    if proto.ByteSize() > _LARGEST_FILE:
        raise OnnxGraphError(f"{path} holds {proto.ByteSize():,} bytes; networks of up to 2 GiB are read")
    return proto


def _checked(proto: onnx.ModelProto, path: Path) -> tuple[ir.Model, SetAside]:
    """Return the graph of a file that ONNX's checker accepts, without what is set aside, and that.

    Nodes are put in order, as onnxruntime does where converters append them at the end.
    """
    for entry in proto.graph.input:
        if entry.type.WhichOneof("value") != "tensor_type":
            raise OnnxGraphError(
                f"{path}: the input {entry.name!r} is no tensor; only tensors can be given. Cut the network "
                "off behind it: onnx.utils.extract_model(FILE, TARGET, INPUTS, OUTPUTS)"
            )
    functions = bool(proto.functions)
    aside = SetAside() if functions else set_aside_outputs(proto)
    sparse = {}
    try:
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError:
            sparse = store_densely(proto)
            model = ir.from_proto(proto)
            model.graph.sort()
            proto = to_proto(model)
            onnx.checker.check_model(proto)
        sparse |= store_densely(proto)
    except ExportError as error:
        raise OnnxGraphError(f"{path}: {error}") from error
    except Exception as error:  # the checker's, and those of what cannot be put in order
        raise OnnxGraphError(
            f"{path} is damaged, ONNX's own checker says: {error}. Fetch or export it again"
        ) from error
    if functions:
        proto = inliner.inline_local_functions(proto, convert_version=True)
        aside = set_aside_outputs(proto)
    return ir.from_proto(proto), replace(aside, sparse=sparse)


def _converted(model: ir.Model, path: Path, opset: int) -> ir.Model:
    """Return a model in the oldest operator set that is taken."""
    try:
        converted: onnx.ModelProto = version_converter.convert_version(to_proto(model), LEAST_OPSET)
        onnx.checker.check_model(converted)
    except Exception as error:  # the converter's own, and those of what it does not know
        raise OnnxGraphError(
            f"{path} has opset {opset}; {LEAST_OPSET} or newer is needed, to which onnx's version converter "
            f"cannot convert it ({error}). Export it anew with a newer one"
        ) from error
    converted.ir_version = max(converted.ir_version, _LEAST_IR)
    return ir.from_proto(converted)


def free_sizes(graph: ir.Graph) -> bool:
    """Make sizes free that are written as -1 or 0, as Paddle's exporter does; tell whether there were any."""
    changed = False
    for value in values_in(graph):
        sizes = [] if value.shape is None or value.is_initializer() else list(value.shape)
        if any(isinstance(axis, int) and axis < 1 for axis in sizes):
            value.shape = ir.Shape(None if isinstance(axis, int) and axis < 1 else axis for axis in sizes)
            changed = True
    return changed


def _name_nodes(model: ir.Model) -> None:
    """Give every node of the graph and of its bodies a name of its own, which plans go by."""
    taken = {node.name for node in model.graph.all_nodes() if node.name}
    seen: set[str] = set()
    for graph in model.graphs():
        for index, node in enumerate(graph):
            if not node.name or node.name in seen:
                stem, number = f"{node.name or node.op_type}_{index}", 0
                while (name := f"{stem}_{number}" if number else stem) in taken:
                    number += 1
                node.name = name
                taken.add(name)
            seen.add(node.name)
