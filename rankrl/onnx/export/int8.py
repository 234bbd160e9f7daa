"""Quantise ONNX files to 8-bit integers, with onnxruntime's static quantiser or NNCF.

The nodes that compute in integers are chosen, and activations and means are rewritten so that they can.
onnxruntime has neither HardSigmoid nor HardSwish, x * HardSigmoid(x), in integers; between integers they
become a table of 256 numbers and a product of integers. HardSigmoid(x) = clip(alpha * x + beta, 0, 1) in
steps of 1 / 255 equals alpha * x quantised with the zero point 255 * beta, the same integers read with a zero
point of 0. LeakyRelu with a slope of 1, which onnxruntime computes by a table (QLinearLeakyRelu), carries
integers from one scale to the other.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from rankrl.errors import ExportError
from rankrl.onnx.export.graph_passes import selects, store_selections, unpad_channels
from rankrl.onnx.export.static_quantiser import Cut, Feed, RangeChoice, StaticQuantiser, reduces
from rankrl.onnx.graph_edits import (
    dequantises,
    is_constant,
    is_standard,
    names_in,
    new_constant,
    new_name,
    node_of,
    opset_of,
    put_in_place,
    quantises,
    stored,
    values_in,
    without_unused,
)
from rankrl.onnx.protobuf import load_model, write_checked
from rankrl.onnx.runtimes import Batch, open_session

_STEPS = 255  # between the ends of a uint8 range
_SLOPE, _MIDDLE = 1 / 6, 0.5
"""Of the gate of HardSwish (ai.onnx, version 14)."""
_DEFAULTS = {"alpha": 0.2, "beta": 0.5}
"""Of HardSigmoid (ai.onnx, version 6)."""


def join_hard_swishes(model: ir.Model) -> int:
    """Write x * clip(x + a, 0, c) / c, as in files of older operator sets, as x * HardSigmoid(x)."""
    joined = 0
    for node in list(model.graph):
        match = _product(node)
        if match is None:
            continue
        x, shift, limit = match
        name = str(node.name)
        gate = node_of("HardSigmoid", [x], f"{name}/gate", {"alpha": 1 / limit, "beta": shift / limit})
        put_in_place(model.graph, [node], [gate, node_of("Mul", [x, gate.outputs[0]], name)])
        joined += 1
    if joined:
        without_unused(model)
    return joined


def _product(node: ir.Node) -> tuple[ir.Value, float, float] | None:
    """Return x, a and c where a node computes x * clip(x + a, 0, c) / c, divided at the end or before."""
    whole = _divided(node)
    inner = node if whole is None else _producer(whole[0])
    if inner is None or not is_standard(inner, "Mul"):
        return None
    for x, other in (inner.inputs, reversed(inner.inputs)):
        divided = _divided(_producer(other)) if whole is None else (other, whole[1])
        clipped = None if divided is None else _producer(divided[0])
        if x is None or divided is None or clipped is None or not is_standard(clipped, "Clip"):
            continue
        low, high = (_number(value) for value in (*clipped.inputs[1:], None, None)[:2])
        added = _producer(clipped.inputs[0])
        if low != 0 or high is None or not np.isclose(high, divided[1]) or added is None:
            continue
        if is_standard(added, "Add") and x in added.inputs:
            shift = _number(added.inputs[1 - added.inputs.index(x)])
            if shift is not None and 0 <= shift <= high:
                return x, shift, high
    return None


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _divided(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """Return the dividend and the divisor of a node that divides by a number, else None."""
    if node is None or not is_standard(node, "Div", "Mul"):
        return None
    for value, other in (node.inputs, reversed(node.inputs)):
        number = _number(other)
        if value is not None and number:
            return value, number if node.op_type == "Div" else 1 / number
        if node.op_type == "Div":
            break
    return None


def _number(value: ir.Value | None) -> float | None:
    array = stored(value)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def tabulate_gates(graph: ir.Graph, before: Collection[str | None]) -> None:
    """Compute HardSigmoid and HardSwish between integers by tables."""
    for node in [node for node in graph if is_standard(node, "HardSigmoid", "HardSwish")]:
        rounded = _producer(node.inputs[0])
        readers = [use.node for use in node.outputs[0].uses()]
        between = rounded is not None and dequantises(rounded) and rounded.name not in before
        if not between or rounded is None or not readers or node.outputs[0].is_graph_output():
            continue
        if not all(quantises(reader) and reader.name not in before for reader in readers):
            continue
        if node.op_type == "HardSwish":
            table = _table(graph, rounded, _SLOPE, _MIDDLE, str(node.name))
            product = node_of("Mul", [node.inputs[0], table[-1].outputs[0]], f"{node.name}/product")
            put_in_place(graph, [node], [*table, product])
            continue
        alpha, beta = (node.attributes.get_float(key, number) for key, number in _DEFAULTS.items())
        if not 0 <= beta <= 1:
            continue
        table = _table(graph, rounded, alpha, beta, str(node.name))
        graph.insert_after(node, table)
        for reader in readers:
            for user in [use.node for use in reader.outputs[0].uses()]:
                user.outputs[0].replace_all_uses_with(table[-1].outputs[0])


def _table(graph: ir.Graph, rounded: ir.Node, alpha: float, beta: float, name: str) -> list[ir.Node]:
    """Return the nodes that compute HardSigmoid of the integers behind the `DequantizeLinear` `rounded`."""
    integers, scale, zero = rounded.inputs
    known = stored(scale)
    assert known is not None
    slope = new_constant(graph, f"{name}/slope", (known * alpha).astype(np.float32))
    step = new_constant(graph, f"{name}/step", np.float32(1 / _STEPS))
    middle, none = (
        new_constant(graph, f"{name}/{what}", np.uint8(number))
        for what, number in (("middle", round(_STEPS * beta)), ("none", 0))
    )
    turned = node_of("DequantizeLinear", [integers, slope, zero], f"{name}/turned")
    moved = node_of("LeakyRelu", [turned.outputs[0]], f"{name}/moved", {"alpha": 1.0})
    cut = node_of("QuantizeLinear", [moved.outputs[0], step, middle], f"{name}/cut")
    gate = node_of("DequantizeLinear", [cut.outputs[0], step, none], f"{name}/gate")
    return [turned, moved, cut, gate]


# Operators that only move, add or compare numbers: in integers where all of their inputs are.
_PASSING = frozenset(
    ("Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Flatten")
) | {"Transpose", "Squeeze", "Unsqueeze", "Slice", "Pad", "LeakyRelu", "Resize"}
_COMPUTING = frozenset(("Conv", "Gemm", "MatMul"))
_GATES = frozenset(("Sigmoid", "HardSigmoid"))
_BETWEEN = frozenset(("HardSwish", "Gelu", "Mish"))
"""Activations without an integer kernel."""
_IMAGE = 4
"""Axes of a batch of images."""


def integer_nodes(graph: ir.Graph, weights: Collection[str]) -> list[ir.Node]:
    """Return the nodes that compute in integers: those of the named weights, and nodes between them.

    A pooling, reshape or the like is one of them where its input is the output of such a node; an addition,
    too, where one summand is and the other at least is the input of a weight's node, as it is or subsampled.
    A convolution of groups, which plans do not name, is where its input is. A product is where one factor is,
    and the other is, too, or is a gate (a sigmoid); a sigmoid where nothing but products reads it, since the
    steps of a probability are too coarse for an output. An activation without an integer kernel between
    integers is rounded again for means, sums, products and convolutions of groups.
    """
    owners = [
        (value.name, node)
        for node in graph
        if is_standard(node, *_COMPUTING)
        for value in node.inputs
        if value is not None and value.name in weights
    ]
    missing = sorted(set(weights) - {name for name, _ in owners})
    if missing:
        raise ExportError(
            f"the weight {missing[0]!r} belongs to no convolution or matrix product of the graph, so "
            "nothing can compute with it in integers; leave its layer without Quantise"
        )
    nodes = {node for _, node in owners}
    produced = {value for _, node in owners for value in node.outputs}
    between = set[ir.Value]()
    taken = {node.inputs[0] for _, node in owners}
    summands = {(node.inputs[0], node.inputs[1]) for node in graph if is_standard(node, "Add")}
    added_to = dict(summands) | {second: first for first, second in summands}
    for node in graph:  # in topological order
        inputs = {value for value in node.inputs if value is not None and not is_constant(value)}
        if is_standard(node, *_BETWEEN) and inputs <= produced:
            between.update(node.outputs)
            continue
        if selects(node):
            passes = inputs <= produced or (inputs <= taken and added_to.get(node.outputs[0]) in produced)
        elif _is_grouped(node):
            passes = inputs <= produced | between
        elif is_standard(node, "Mul"):
            factors = {value for value in inputs if not _is_gate(value)} or inputs
            passes = len(inputs) > 1 and factors <= produced | between
        elif is_standard(node, "Sigmoid"):
            passes = inputs <= produced and _is_gate(node.outputs[0])
        else:
            known = produced | taken | between if is_standard(node, "Add") else produced
            passes = is_standard(node, *_PASSING) and bool(inputs & produced) and inputs <= known
            passes = passes and not clips_zero(node)
            passes = passes or (is_standard(node, "GlobalAveragePool") and inputs <= between)
        if passes:
            nodes.add(node)
            produced.update(node.outputs)
    return [node for node in graph if node in nodes]


def clips_zero(node: ir.Node) -> bool:
    """Tell whether a node clips to a range without zero, which the quantiser adds, or an unknown one."""
    if not is_standard(node, "Clip"):
        return False
    bounds = [None if value is None else stored(value) for value in node.inputs[1:3]]
    known = all(bound is not None for bound, value in zip(bounds, node.inputs[1:3], strict=True) if value)
    low, high = (*bounds, None, None)[:2]
    return not known or bool(low is not None and low > 0) or bool(high is not None and high < 0)


def _is_grouped(node: ir.Node) -> bool:
    """Tell whether a node is a grouped (most often depthwise) convolution with a constant weight."""
    return (
        is_standard(node, "Conv") and node.attributes.get_int("group", 1) > 1 and is_constant(node.inputs[1])
    )


def _is_gate(value: ir.Value) -> bool:
    """Tell whether a value is a sigmoid that only products read."""
    producer, uses = value.producer(), list(value.uses())
    if producer is None or not is_standard(producer, *_GATES) or value.is_graph_output():
        return False
    return bool(uses) and all(is_standard(use.node, "Mul") for use in uses)


def pool_means(model: ir.Model) -> int:
    """Replace means over rows and columns of images by GlobalAveragePool, which has an integer kernel."""
    means = [node for node in model.graph if is_standard(node, "ReduceMean") and _is_pooling(node)]
    for node in means:
        pooling = node_of("GlobalAveragePool", [node.inputs[0]], str(node.name), {})
        put_in_place(model.graph, [node], [pooling])
    return len(means)


def _is_pooling(node: ir.Node) -> bool:
    value = node.inputs[0]
    if value is None or value.shape is None or len(value.shape) != _IMAGE:
        return False
    if len(node.inputs) > 1:
        array = stored(node.inputs[1])
        axes = [] if array is None else array.reshape(-1).tolist()
    else:
        axes = list(node.attributes.get_ints("axes", ()))
    keeps = node.attributes.get_int("keepdims", 1) == 1
    return keeps and sorted(axis % _IMAGE for axis in axes) == [_IMAGE - 2, _IMAGE - 1]


class QuantiserCopy:
    """A renamed network in which names that the quantiser adds clash with nothing, until `restore`."""

    def __init__(self, model: ir.Model) -> None:
        graph = model.graph
        self._stem = _unused_stem(graph)
        self.names: dict[str, str] = {}
        """Names of nodes and values in the original, by their names in the copy."""
        self.values: dict[str, str] = {}
        """Names of values in the copy, by their names in the original."""
        self._inside = set[str]()
        self.apart: list[str] = []
        """Names of the nodes through which outputs and bodies read."""
        for node in graph:
            node.name = self._hidden(node.name or "")
        for value in dict.fromkeys(values_in(graph)):
            if value.name:
                self.values[value.name] = hidden = self._hidden(value.name)
                value.name = hidden
        for value in [value for node in graph for value in node.outputs if value.name]:
            self._set_apart(graph, value)
        graph.sort()

    def _set_apart(self, graph: ir.Graph, value: ir.Value) -> None:
        """Insert an `Identity` before bodies that read a value, and before an output that nodes read, too."""
        outside = [use for use in value.uses() if use.node.graph is not graph]
        if not outside and not (value.is_graph_output() and value.uses()):
            return
        name = str(value.name)
        value.name = self._hidden(self.names[name])
        self._inside.add(value.name)
        self.apart.append(self._hidden(""))
        seen = ir.val(name, type=value.type, shape=value.shape)
        for position, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[position] = seen
        graph.append(ir.node("Identity", [value], name=self.apart[-1], outputs=[seen]))
        for node, index in outside:
            node.replace_input_with(index, seen)

    def restore(self, model: ir.Model) -> None:
        """Restore the names and sort the nodes; added nodes are named after those that they belong to."""
        graph = model.graph
        self._join(graph)
        taken = names_in(graph) | set(self.names.values())
        for named in (*graph, *dict.fromkeys(values_in(graph))):
            if named.name:
                named.name = self._given_back(named.name, taken)
        graph.sort()

    def _join(self, graph: ir.Graph) -> None:
        """Remove the `Identity` nodes that `_set_apart` inserted."""
        for node in [node for node in graph if node.name in self.apart]:
            value, seen = node.inputs[0], node.outputs[0]
            if value is not None and value.producer() is not None:
                seen.replace_all_uses_with(value, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                value.name, value.type, value.shape = seen.name, seen.type, seen.shape

    def _hidden(self, name: str) -> str:
        hidden = f"{self._stem}{len(self.names)}_"
        self.names[hidden] = name
        return hidden

    def _given_back(self, name: str, taken: set[str]) -> str:
        match = re.fullmatch(rf"({self._stem}\d+_)(.*)", name, re.DOTALL)
        if match is None:
            return name
        known, added = match.groups()
        if known in self._inside and not added:  # rounded, it has the name that it had
            added = "_QuantizeLinear_Input"
        before = self.names[known] + added
        return new_name(before, taken) if added else before


def _unused_stem(graph: ir.Graph) -> str:
    names = names_in(graph)
    stem = "q"
    while any(name.startswith(stem) for name in names):
        stem += "q"
    return stem


_LEAST_OPSET = 13  # the first in which QuantizeLinear has a scale for each channel


def quantise_onnx(
    path: str | Path,
    target: str | Path,
    inputs: Iterable[Batch],
    *,
    weights: Collection[str] | None = None,
    reduce_range: bool | None = None,
    cut: Cut | None = None,
    fitted: bool = True,
    choice: RangeChoice | None = None,
) -> Path:
    """Write an ONNX file whose convolutions and matrix products compute in 8-bit integers."""
    path, target = Path(path), Path(target)
    copy, quantiser = _prepared(path, inputs, weights, reduce_range, cut)
    with _refused(path):
        if not fitted:
            quantised = quantiser.unfitted()
        elif choice is None:
            quantised = quantiser.quantised(quantiser.choose())
        else:
            quantised = quantiser.quantised(choice.renamed(copy.names))
    copy.restore(quantised)
    write_checked(quantised, target, f"{path} in integers")
    return target


def choose_ranges(
    path: str | Path,
    inputs: Iterable[Batch],
    *,
    weights: Collection[str] | None = None,
    reduce_range: bool | None = None,
    cut: Cut | None = None,
) -> RangeChoice:
    """Choose the ranges and bias corrections with which a network loses least in 8-bit integers."""
    path = Path(path)
    copy, quantiser = _prepared(path, inputs, weights, reduce_range, cut)
    with _refused(path):
        choice = quantiser.choose()
    return choice.renamed({known: hidden for hidden, known in copy.names.items()})


def _prepared(
    path: Path,
    inputs: Iterable[Batch],
    weights: Collection[str] | None,
    reduce_range: bool | None,
    cut: Cut | None,
) -> tuple[QuantiserCopy, StaticQuantiser]:
    session = open_session(path)
    model = _checked_model(path, partly=weights is not None)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    unpad_channels(model)
    pool_means(model)
    join_hard_swishes(model)
    store_selections(model)  # the quantiser takes stored constants alone for weights and biases
    computing = None if weights is None else integer_nodes(model.graph, weights)
    before = list(model.graph)
    copy = QuantiserCopy(model)
    nodes = None if computing is None else [str(node.name) for node in computing]
    left = [*copy.apart, *(str(node.name) for node in model.graph if clips_zero(node))]
    fixed = session.fixed_batch
    feeds = [batch if isinstance(batch, Mapping) else {session.input_name: batch} for batch in inputs]
    parts = cut or (_along_first if fixed is None else _whole)
    singles = [
        part
        for feed in feeds
        if fixed is None or fixed == len(feed[session.input_name])
        for part in parts(feed, 1)
    ]
    if not singles:
        needed = "" if fixed is None else f" of {fixed}, the batch size of the file,"
        raise ExportError(
            f"{path} cannot be quantised without calibration batches{needed}: give a few hundred inputs."
        )
    for output in session.run(singles[0]):
        if output.dtype.kind == "f" and not np.isfinite(output).all():
            raise ExportError(
                f"{path} returns NaN or infinite values on the calibration inputs, so there are no ranges to "
                "quantise to; check the network and the inputs."
            )

    names = {node.name for node in before}

    def finish(quantised: ir.Model) -> None:
        if nodes is not None:
            _spare_floats(quantised.graph, set(nodes), names)
        tabulate_gates(quantised.graph, names)
        without_unused(quantised)

    renamed = [{copy.values[name]: array for name, array in feed.items()} for feed in singles]
    return copy, StaticQuantiser(model, nodes, left, reduces(reduce_range), renamed, finish)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Raise exceptions of onnxruntime's Python code as an `ExportError`."""
    try:
        yield
    except Exception as error:
        raise ExportError(f"onnxruntime cannot quantise {path}: {error}") from error


def _along_first(feed: Feed, size: int) -> Iterator[Feed]:
    """Cut a batch along the first axis of its arrays; it stays whole where they differ in their lengths."""
    lengths = {len(array) if array.ndim else 0 for array in feed.values()}
    count = lengths.pop() if len(lengths) == 1 else 0
    if not count:
        yield feed
    for first in range(0, count, size):
        yield {name: array[first : first + size] for name, array in feed.items()}


def _whole(feed: Feed, size: int) -> Iterator[Feed]:
    del size
    yield feed


def _spare_floats(graph: ir.Graph, nodes: Collection[str], before: Collection[str | None]) -> None:
    """Connect floating-point nodes to the unrounded tensors of other floating-point nodes."""
    for node in graph:
        rounding = node.inputs[0].producer() if dequantises(node) and node.inputs[0] is not None else None
        if rounding is None or node.name in before:
            continue
        source = rounding.inputs[0]  # what went into QuantizeLinear
        producer = None if source is None else source.producer()
        if producer is not None and producer.name in nodes:
            continue
        for user, index in node.outputs[0].uses():
            inside = user.name in nodes or quantises(user) or dequantises(user)
            if user.graph is graph and not inside:
                user.replace_input_with(index, source)


def _checked_model(path: Path, *, partly: bool) -> ir.Model:
    model = load_model(path)
    opset = opset_of(model)
    if opset < _LEAST_OPSET:
        raise ExportError(
            f"{path} has opset {opset}; 8-bit integers need {_LEAST_OPSET} or newer. Export it with "
            "export.opset=null."
        )
    if not partly and any(quantises(node) for node in model.graph):
        raise ExportError(f"{path} is quantised already; quantise the float32 file that it was made from.")
    return model


_MOST_BATCHES = 300
"""Batches that NNCF looks at; it takes this many by itself."""


def nncf_obstacle() -> str | None:
    """Return a message that names a missing package and how to install it, or None."""
    for package in ("openvino", "nncf"):
        try:
            importlib.import_module(package)
        except ImportError:
            return f"NNCF's int8 needs the package {package}; install it with `pip install 'rankrl[nncf]'`"
    return None


def quantise_with_nncf(path: str | Path, target: str | Path, inputs: Iterable[Batch]) -> Path:
    obstacle = nncf_obstacle()
    if obstacle is not None:
        raise ExportError(obstacle)
    nncf: Any = importlib.import_module("nncf")
    openvino: Any = importlib.import_module("openvino")
    target = Path(target)
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = openvino.Core().read_model(str(path))
            data = nncf.Dataset(list(islice(inputs, _MOST_BATCHES)))
            quantised = nncf.quantize(model, data, preset=nncf.QuantizationPreset.MIXED)
            openvino.save_model(quantised, str(target), compress_to_fp16=False)
    except Exception as error:  # NNCF's and OpenVINO's errors have no common base
        raise ExportError(f"NNCF cannot quantise {path}: {error}") from error
    finally:
        logger.setLevel(level)
    return target
