"""Convert between ONNX files, protobuf and onnx_ir, which has no sparse constants or non-tensor outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from google.protobuf.message import Message  # type: ignore[import-untyped, unused-ignore]
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as MissingKernel

from rankrl.errors import DefectError, ExportError
from rankrl.files import write_atomically
from rankrl.onnx.graph_edits import STANDARD
from rankrl.onnx.runtimes import inference_session

_MOST_BYTES = 2**31 - 1
"""Largest size of one protobuf message, a whole network, in bytes."""


def store_densely(model: onnx.ModelProto) -> dict[str, onnx.SparseTensorProto]:
    """Turn sparse constants into dense ones, initializers and those of `Constant` nodes alike."""
    found: dict[str, onnx.SparseTensorProto] = {}

    def densely(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
        itemsize = helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
        size = math.prod(sparse.dims) * itemsize
        if model.ByteSize() + size > _MOST_BYTES:
            raise ExportError(
                f"the sparse constant {name!r} of shape {tuple(sparse.dims)} takes {size:,} bytes when it is "
                "dense; networks of up to 2 GiB are read"
            )
        if main:
            found[name] = onnx.SparseTensorProto()
            found[name].CopyFrom(sparse)
        return dense(sparse, name)

    for number, graph in enumerate(_with_bodies(model.graph)):
        main = number == 0
        for sparse in graph.sparse_initializer:
            graph.initializer.append(densely(sparse, sparse.values.name))
        del graph.sparse_initializer[:]
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in STANDARD:
                for attribute in node.attribute:
                    if attribute.name == "sparse_value":
                        value = densely(attribute.sparse_tensor, node.output[0])
                        attribute.CopyFrom(helper.make_attribute("value", value))
    return found


def store_sparsely(model: onnx.ModelProto, constants: Mapping[str, onnx.SparseTensorProto]) -> None:
    """Turn unchanged constants of the main graph into sparse ones again, in place."""
    graph = model.graph
    for index in reversed(range(len(graph.initializer))):
        name = graph.initializer[index].name
        if name in constants and holds(constants[name], numpy_helper.to_array(graph.initializer[index])):
            del graph.initializer[index]
            graph.sparse_initializer.append(constants[name])
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in constants:
            sparse = helper.make_attribute("sparse_value", constants[node.output[0]])
            node.attribute[0].CopyFrom(sparse)


def holds(constant: onnx.SparseTensorProto, array: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(numpy_helper.to_array(dense(constant, "")), array)


def sparse_bytes(constant: onnx.SparseTensorProto) -> int:
    return sum(numpy_helper.to_array(part).nbytes for part in (constant.values, constant.indices))


def dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Return a sparse tensor, of places in the whole or along each axis, as a dense one of some name."""
    values = numpy_helper.to_array(sparse.values)
    places = numpy_helper.to_array(sparse.indices)
    if places.ndim == 2:
        places = np.ravel_multi_index(tuple(places.T), tuple(sparse.dims)) if len(places) else places[:, 0]
    whole = np.zeros(math.prod(sparse.dims), values.dtype)
    whole[places] = values
    return numpy_helper.from_array(whole.reshape(tuple(sparse.dims)), name)


def _with_bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in _bodies(node):
            yield from _with_bodies(body)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


_UNKNOWN = (None, None)
"""Sizes of a tensor of which none are known, as behind those operators: inputs and classes. ONNX's
checker wants some of every output, and onnxruntime minds none."""


@dataclass(frozen=True)
class SetAside:
    """Nodes and outputs that were cut off a file."""

    sparse: Mapping[str, onnx.SparseTensorProto] = field(default_factory=dict)
    outputs: tuple[onnx.ValueInfoProto, ...] = ()
    nodes: tuple[onnx.NodeProto, ...] = ()
    constants: tuple[onnx.TensorProto, ...] = ()
    opsets: tuple[onnx.OperatorSetIdProto, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sparse or self.outputs)

    def put_back(self, model: onnx.ModelProto, *, tensors: bool = False) -> onnx.ModelProto:
        """Add what was set aside to a graph, in place; return it."""
        graph = model.graph
        store_sparsely(model, self.sparse)
        if not self.outputs:
            return model
        made = {name for node in graph.node for name in node.output}
        graph.node.extend(node for node in self.nodes if node.output[0] not in made)
        known = {constant.name for constant in graph.initializer}
        graph.initializer.extend(constant for constant in self.constants if constant.name not in known)
        domains = {opset.domain for opset in model.opset_import}
        model.opset_import.extend(opset for opset in self.opsets if opset.domain not in domains)
        present = {output.name: output for output in graph.output}
        outputs = [present.pop(output.name, output) for output in self.outputs]
        outputs += present.values() if tensors else ()
        del graph.output[:]
        graph.output.extend(outputs)
        return model


def set_aside_outputs(model: onnx.ModelProto) -> SetAside:
    """Cut a graph off at the tensors of which outputs of other kinds are made, sequences and maps."""
    graph = model.graph
    tensors = [output for output in graph.output if _is_tensor(output)]
    if len(tensors) == len(graph.output):
        return SetAside()
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    producers = {name: node for node in graph.node for name in node.output if name}
    behind: dict[str, onnx.NodeProto] = {}
    ends: dict[str, onnx.ValueInfoProto] = {}
    waiting = [output.name for output in graph.output if not _is_tensor(output)]
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.output[0] in behind:
            continue
        behind[node.output[0]] = node
        for name in _reads(node):
            if name not in producers:
                continue
            known = types.get(name, helper.make_tensor_value_info(name, TensorProto.FLOAT, _UNKNOWN))
            if _is_tensor(known) and producers[name].input:
                ends[name] = _with_shape(known)
            else:
                waiting.append(name)
    stays = [node for node in graph.node if node.output[0] not in behind]
    while stays:  # what other nodes read has to stay, too
        needed = {name for node in stays for name in _reads(node)} | {output.name for output in tensors}
        stays = [behind.pop(key) for key, node in list(behind.items()) if needed & set(node.output)]
    read = {name for node in behind.values() for name in _reads(node)}
    aside = SetAside(
        outputs=tuple(map(_copy, graph.output)),
        nodes=tuple(_copy(node) for node in graph.node if node.output[0] in behind),
        constants=tuple(_copy(constant) for constant in graph.initializer if constant.name in read),
        opsets=tuple(map(_copy, model.opset_import)),
    )
    given = {output.name for output in tensors}
    outputs = [*tensors, *(value for name, value in ends.items() if name not in given)]
    gone = {name for node in behind.values() for name in node.output}
    values = [value for value in graph.value_info if value.name not in gone]
    for field_name, kept in (
        ("node", [node for node in graph.node if node.output[0] not in behind]),
        ("output", outputs),
        ("value_info", values),
    ):
        copies = list(map(_copy, kept))
        graph.ClearField(field_name)
        getattr(graph, field_name).extend(copies)
    return aside


_Message = TypeVar("_Message", bound=Message)


def _copy(message: _Message) -> _Message:
    """Copy a part of a graph, which does not outlive its removal."""
    made = type(message)()
    made.CopyFrom(message)
    return made


def _with_shape(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    kind = value.type.tensor_type
    if kind.HasField("shape"):
        return value
    return helper.make_tensor_value_info(value.name, kind.elem_type, _UNKNOWN)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.WhichOneof("value") == "tensor_type")


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from filter(None, node.input)
    yield from (name for body in _bodies(node) for inner in body.node for name in _reads(inner))


def load_model(path: str | Path) -> ir.Model:
    """Return the model of a file and its external data, dense, without what is behind its tensors."""
    model = onnx.load(path)
    set_aside_outputs(model)
    store_densely(model)
    return ir.from_proto(model)


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model as protobuf, which onnx's checker and converter and onnxruntime take."""
    proto = ir.to_proto(model)
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}  # they say their types and sizes themselves
    values = [value for value in graph.value_info if value.name not in constants]
    if len(values) < len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(values)
    return proto


def save_model(model: ir.Model, path: str | Path) -> None:
    onnx.save(to_proto(model), path)


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
