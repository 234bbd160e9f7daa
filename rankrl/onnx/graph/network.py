"""Read, check and normalise ONNX files, suggest batch axes of their inputs, and run them in onnxruntime."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx import inliner, version_converter
from onnx_ir.passes import common as passes

from decomposition.cache import digest
from rankrl.errors import ExportError, OnnxGraphError
from rankrl.onnx.export.graph_passes import unpad_channels
from rankrl.onnx.graph.precisions import (
    HALF,
    HALF_BYTES,
    HalfValues,
    half_values,
    in_float32,
    in_half,
    without_casts,
)
from rankrl.onnx.graph_edits import STANDARD, Array, opset_of, values_in
from rankrl.onnx.protobuf import (
    SetAside,
    holds,
    save_model,
    set_aside_outputs,
    sparse_bytes,
    store_densely,
    to_proto,
)
from rankrl.onnx.runtimes import inference_session


@dataclass(frozen=True)
class GraphInput:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.name!r} ({self.dtype}, {sizes})"


@dataclass(frozen=True)
class BatchAxes:
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None] = field(default_factory=dict)
    fixed: int | None = None

    def size(self, feed: Feed) -> int:
        """Return the number of inputs in a batch; one where no axis counts them."""
        return next(
            (int(feed[name].shape[axis]) for name, axis in self.inputs.items() if axis is not None), 1
        )

    def check(self, feed: Feed) -> None:
        """Refuse a batch whose arrays count different numbers of inputs."""
        counts = {name: feed[name].shape[axis] for name, axis in self.inputs.items() if axis is not None}
        if len(set(counts.values())) > 1:
            listed = ", ".join(
                f"{name!r} {count} (axis {self.inputs[name]})" for name, count in counts.items()
            )
            raise OnnxGraphError(
                f"the inputs have different numbers of entries on the axes that count them: {listed}; give "
                "as many of each, or say which axes count them, null for an input that goes with every batch "
                f"as it is: {shown_axes(self.inputs)}"
            )

    def rows(self, feed: Feed, index: slice | Array) -> dict[str, Array]:
        arrays = {}
        for name, value in feed.items():
            axis = self.inputs.get(name)
            arrays[name] = value if axis is None else value[(*[slice(None)] * axis, index)]
        return arrays

    def one(self, feed: Feed) -> Feed:
        """Return the first input of a batch, or the batch where its size is fixed."""
        return feed if self.fixed is not None else self.rows(feed, slice(1))

    def parts(self, feed: Feed, size: int) -> Iterator[Feed]:
        """Cut a batch into smaller ones; it stays whole where its size is fixed."""
        if self.fixed is not None:
            yield feed
            return
        for first in range(0, self.size(feed), size):
            yield self.rows(feed, slice(first, first + size))

    def joined(self, feeds: Sequence[Feed]) -> dict[str, Array]:
        """Return batches of one `kind` as one; a single one is not copied."""
        if len(feeds) == 1:
            return dict(feeds[0])
        return {
            name: feeds[0][name] if axis is None else np.concatenate([feed[name] for feed in feeds], axis)
            for name, axis in self.inputs.items()
        }

    def kind(self, feed: Feed) -> tuple[object, ...]:
        """Return a key shared by batches that can be joined: other sizes, and arrays without a batch axis."""
        parts: list[object] = []
        for name, axis in self.inputs.items():
            value = feed[name]
            if axis is None:
                parts.append((value.shape, value.tobytes()))
            else:
                parts.append(value.shape[:axis] + value.shape[axis + 1 :])
        return tuple(parts)

    def first_axis(self, name: str, output: Array) -> Array:
        """Return an output with its batch axis in front; flat where it has none."""
        axis = self.outputs.get(name, 0)
        return output.reshape(-1) if axis is None else np.moveaxis(output, axis, 0) if axis else output


def by_input(numbers: Array, count: int) -> Array:
    """Return numbers as rows (count, numbers), one for each of `count` inputs."""
    if not numbers.ndim or len(numbers) % count:
        numbers = np.pad(numbers.reshape(-1), (0, -numbers.size % count))
    return numbers.reshape(count, -1)


def shown_axes(axes: Mapping[str, int | None]) -> str:
    """Format axes as their option is written on the command line."""
    entries = ", ".join(f"{name}: {'null' if axis is None else axis}" for name, axis in axes.items())
    return f"batch_axes={{{entries}}}"


Axes = Mapping[str, int | None]
"""The axis that counts the inputs of a batch by the name of the input; None for none."""
Shape = tuple[int, ...]

_HINT = "batch"
"""Words that exporters put into the name of the axis."""


def axes_in_file(inputs: Sequence[GraphInput]) -> BatchAxes:
    """Return the batch axes that the names and sizes in a file suggest."""
    axes = next(suggested_axes(inputs, {}, {}))
    return BatchAxes(axes, fixed=declared_batch(inputs, axes))


def declared_batch(inputs: Sequence[GraphInput], axes: Axes) -> int | None:
    counted = [(entry, axis) for entry in inputs if (axis := axes[entry.name]) is not None]
    return next((size for entry, axis in counted if (size := entry.shape[axis]) is not None), None)


def suggested_axes(
    inputs: Sequence[GraphInput], stated: Axes, sizes: Mapping[str, Shape]
) -> Iterator[dict[str, int | None]]:
    """Yield axes for all inputs, the likeliest first; each begins with one axis, which the others follow."""
    left = [entry for entry in inputs if entry.name not in stated and entry.shape]
    known = next(((entry, axis) for entry in inputs if (axis := stated.get(entry.name)) is not None), None)
    free = [(entry, axis) for entry in left for axis in _free(entry)]
    begins = [(entry, axis) for entry, axis in free if axis == 0 or _HINT in entry.names[axis].lower()]
    begins += [(entry, 1) for entry, axis in begins if axis == 0 and 1 in _free(entry)]
    weighty = [entry for entry in left if len(entry.shape) > 1 and _free(entry)]
    if weighty and all(len(entry.shape) == 1 and axis == 0 for entry, axis in begins):
        begins = []  # axes of lengths and masks do not tell those of the arrays next to them
    if known is not None:
        begins = [known]
    elif not begins and left:
        begins = [(_deviating(weighty or left, sizes), 0)]

    def order(begin: tuple[GraphInput, int]) -> tuple[bool, int, bool, int]:
        entry, axis = begin
        others = _following(inputs, stated, sizes, entry, axis)
        without = sum(1 for other in left if _free(other) and others[other.name] is None)
        return (
            _HINT not in entry.names[axis].lower(),
            without,
            axis != 0,
            -int(np.prod(sizes.get(entry.name, ()))),
        )

    if not begins:
        yield {entry.name: stated.get(entry.name) for entry in inputs}
    for entry, axis in sorted(begins, key=order):
        yield _following(inputs, stated, sizes, entry, axis)


def _following(
    inputs: Sequence[GraphInput], stated: Axes, sizes: Mapping[str, Shape], begin: GraphInput, axis: int
) -> dict[str, int | None]:
    """Return the axes of all inputs that follow from the axis of one."""
    axes: dict[str, int | None] = {}
    count = sizes[begin.name][axis] if begin.name in sizes else None
    for entry in inputs:
        if entry.name in stated:
            axes[entry.name] = stated[entry.name]
        elif entry is begin:
            axes[entry.name] = axis
        else:
            axes[entry.name] = _alike(entry, sizes.get(entry.name), begin, axis, count)
    return axes


def _alike(
    entry: GraphInput, shape: Shape | None, begin: GraphInput, axis: int, count: int | None
) -> int | None:
    """Return the axis of an input that counts the same as an axis of another one."""
    if not entry.shape:
        return None
    free, declared, name = _free(entry), begin.shape[axis], begin.names[axis]
    for same in free:
        if name and entry.names[same] == name:
            return same
    fits = range(len(entry.shape)) if shape is None else [k for k, size in enumerate(shape) if size == count]
    other = len(entry.shape) == 1 if declared is not None else bool(name and entry.names[0])
    if 0 in free and (0 in fits or not other):
        return 0  # of another length only where the file suggests that it counts something else
    if shape is not None and any(k in free for k in fits):
        return next(k for k in fits if k in free)
    if shape is not None and count is not None:  # a file of one batch size, given arrays of many inputs
        longer = [k for k, size in enumerate(entry.shape) if size not in (None, shape[k])]
        if len(longer) == 1 and longer[0] in fits:
            return longer[0]
    if declared is None or free:
        return None
    return next((k for k, size in enumerate(entry.shape) if size == declared), None)


def _free(entry: GraphInput) -> list[int]:
    return [axis for axis, size in enumerate(entry.shape) if size is None]


def _deviating(inputs: Sequence[GraphInput], sizes: Mapping[str, Shape]) -> GraphInput:
    """Return the first input that has another length than the file declares, or the first of all."""
    longer = [
        entry
        for entry in inputs
        if entry.name in sizes and entry.shape[0] not in (None, sizes[entry.name][0])
    ]
    return (longer or list(inputs))[0]


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
    """Read a file with its external data, unchecked."""
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
    """Check a file, put its nodes in order; return its graph, and the parts that are set aside of it."""
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
    """Free sizes that are written as -1 or 0 (by Paddle's exporter); tell whether there were any."""
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


Feed = Mapping[str, Array]
"""One array for each input of a network, by name."""

_QUIET = onnxruntime.RunOptions()
_QUIET.log_severity_level = 4  # fatal errors alone


@dataclass(frozen=True, eq=False)
class OnnxNetwork:
    """A network read from an ONNX file; the file itself is never written."""

    model: ir.Model
    source: str
    known_axes: BatchAxes | None = None
    half: HalfValues = field(default_factory=HalfValues)
    converted: str = ""
    aside: SetAside = field(default_factory=SetAside)

    @classmethod
    def load(cls, path: str | Path) -> OnnxNetwork:
        model, converted, aside = read_graph(Path(path))
        network = cls(model, str(path), converted=converted, aside=aside)
        if not network.inputs:
            raise OnnxGraphError(f"{path} takes no input, so there is nothing to fit its layers to")
        if not model.graph.outputs:
            raise OnnxGraphError(f"{path} computes no tensor, so there is nothing to compare")
        return network

    @cached_property
    def inputs(self) -> tuple[GraphInput, ...]:
        inputs = []
        for entry in self.model.graph.inputs:
            assert isinstance(entry.type, ir.TensorType)  # others are refused where the file is read
            axes = () if entry.shape is None else tuple(entry.shape)
            sizes = tuple(axis if isinstance(axis, int) else None for axis in axes)
            names = tuple("" if isinstance(axis, int) else axis.value or "" for axis in axes)
            inputs.append(GraphInput(str(entry.name), entry.type.dtype.numpy(), sizes, names))
        return tuple(inputs)

    @cached_property
    def axes(self) -> BatchAxes:
        """Batch axes of the inputs, as far as names and sizes in the file tell where none are known."""
        return axes_in_file(self.inputs) if self.known_axes is None else self.known_axes

    def with_axes(self, axes: BatchAxes) -> OnnxNetwork:
        return replace(self, known_axes=axes)

    def in_float32(self) -> OnnxNetwork:
        """Return the network with its half-precision values in float32; itself if it has none."""
        half = half_values(self.model)
        if not half:
            return self
        if ir.DataType.BFLOAT16 in half.types.values():
            raise OnnxGraphError(
                f"{self.source} is in bfloat16, which onnxruntime does not compute with on a processor, so "
                "that nothing can be compared; export it in float32 or float16"
            )
        return replace(self, model=in_float32(self.model, half), half=half)

    def as_in_file(self) -> OnnxNetwork:
        if not self.half:
            return self
        return replace(self, model=in_half(self.model, self.half, self.source), half=HalfValues())

    def rewritten(self, model: ir.Model) -> OnnxNetwork:
        return replace(self, model=model)

    def without_casts(self, kinds: Collection[ir.DataType] = (ir.DataType.DOUBLE, *HALF)) -> OnnxNetwork:
        """Return the network with constants of some types, which it casts to float32, stored in float32."""
        model = self.graph_model()
        return self.rewritten(model) if without_casts(model, kinds) else self

    def whole(self, *, tensors: bool = False) -> onnx.ModelProto:
        """Return the network with the parts that were set aside of its file (`SetAside.put_back`)."""
        return self.aside.put_back(to_proto(self.model), tensors=tensors)

    def stored_bytes(self, name: str, tensor: ir.TensorProtocol) -> int:
        sparse = self.aside.sparse.get(name)
        if sparse is not None and holds(sparse, tensor.numpy()):
            return sparse_bytes(sparse)
        return tensor.size * HALF_BYTES if name in self.half.types else tensor.nbytes

    def graph_model(self) -> ir.Model:
        """Return the model as a graph of its own that can be changed."""
        return self.model.clone()

    def save(self, path: Path) -> None:
        save_model(self.model, path)

    @cached_property
    def digest(self) -> str:
        return digest(to_proto(self.model).SerializeToString())

    @cached_property
    def weight_inputs(self) -> dict[str, str]:
        """Names of the second inputs of nodes (the weights of products), by the nodes' names."""
        second = {node: node.inputs[1] for node in self.model.graph if len(node.inputs) > 1}
        return {str(node.name): str(value.name) for node, value in second.items() if value is not None}

    def session(self, threads: int = 1) -> GraphSession:
        return GraphSession(self.model, self.source, threads=threads)


def open_session(
    model: ir.Model | onnx.ModelProto | str,
    source: str,
    *,
    threads: int = 1,
    optimised: bool = True,
) -> onnxruntime.InferenceSession:
    """Open a model in onnxruntime, on the processor, for passes that are not timed."""
    try:
        proto = to_proto(model) if isinstance(model, ir.Model) else model
        content = proto if isinstance(proto, str) else proto.SerializeToString()
        return inference_session(content, threads, optimised=optimised, arena=False)
    except Exception as error:  # onnxruntime's error classes have no common base of their own
        raise OnnxGraphError(
            f"onnxruntime {onnxruntime.__version__} cannot run {source}: {error}. Its operators may need "
            "another version of onnxruntime, or an export to standard ONNX operators"
        ) from error


class GraphSession:
    """A graph in onnxruntime, with any number of inputs and outputs."""

    def __init__(
        self,
        model: ir.Model | onnx.ModelProto | onnxruntime.InferenceSession,
        source: str,
        *,
        threads: int = 1,
        tensors: bool = False,
    ) -> None:
        self.source = source
        if isinstance(model, ir.Model | onnx.ModelProto):
            self._session = open_session(model, source, threads=threads)
        else:
            self._session = model
        self.input_names = [entry.name for entry in self._session.get_inputs()]
        outputs = self._session.get_outputs()
        self.output_names = [
            entry.name for entry in outputs if entry.type.startswith("tensor") or not tensors
        ]

    def run(self, feed: Feed, *, quiet: bool = False) -> list[Array]:
        """Return all outputs for one batch; inputs that the graph does not need are left out."""
        arrays = {
            name: np.asarray(value, order="C") for name, value in feed.items() if name in self.input_names
        }
        try:
            outputs: list[Array] = self._session.run(self.output_names, arrays, _QUIET if quiet else None)
        except Exception as error:
            shapes = ", ".join(f"{name!r} {value.dtype} {value.shape}" for name, value in arrays.items())
            raise OnnxGraphError(
                f"{self.source} fails in onnxruntime on the inputs {shapes}: {error}"
            ) from error
        return outputs
