"""Quantise ONNX files to 8-bit integers, with onnxruntime's static quantiser or NNCF."""

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
from rankrl.onnx.export.graph_passes import store_selections, unpad_channels
from rankrl.onnx.export.integer_nodes import (
    clips_zero,
    integer_nodes,
    join_hard_swishes,
    pool_means,
    tabulate_gates,
)
from rankrl.onnx.export.onnx_file import write_checked
from rankrl.onnx.export.static_quantiser import Cut, Feed, RangeChoice, StaticQuantiser, reduces
from rankrl.onnx.graph_edits import (
    dequantises,
    names_in,
    new_name,
    opset_of,
    quantises,
    values_in,
    without_unused,
)
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import Batch, open_session


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
    """Return a prefix that no name in a graph and its bodies begins with."""
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
    """Read and check a file; return the copy that is quantised, and its quantiser."""
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
    """Quantise a file to 8-bit integers with NNCF, through OpenVINO."""
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
