"""Parts of a file that its graph is read without, and written with again.

Those are the nodes that turn tensors into outputs of other kinds, such as the maps that sklearn's converter
makes of probabilities (ZipMap), and the sparse form of constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped, unused-ignore]
from onnx import TensorProto, helper

from rankrl.onnx.sparse import store_sparsely

_UNKNOWN = (None, None)
"""Sizes of a tensor of which none are known, as behind those operators: inputs and classes. ONNX's
checker wants some of every output, and onnxruntime minds none."""


@dataclass(frozen=True)
class SetAside:
    """What was set aside of a file."""

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
    """Yield what a node and its bodies read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from (name for inner in body.node for name in _reads(inner))
