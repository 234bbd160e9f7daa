"""ONNX files in 8-bit integers, by onnxruntime's own quantiser.

Weights become int8, one scale an output channel; activations uint8, one scale a tensor, from the ranges that
they take on calibration inputs (static quantisation; Jacob et al., CVPR 2018). The file says so by pairs of
QuantizeLinear and DequantizeLinear (QDQ), which onnxruntime fuses to integer kernels when it loads it.
Signed activations would be as accurate and, on processors with AVX-512 VNNI, three times slower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.channel_padding import unpad_channels
from rankrl.onnx.export.checked_file import write_checked
from rankrl.onnx.export.hard_swish import join_hard_swishes, tabulate_gates
from rankrl.onnx.export.integer_nodes import clips_zero, integer_nodes, pool_means
from rankrl.onnx.export.quantiser_copy import QuantiserCopy
from rankrl.onnx.export.range_choice import RangeChoice
from rankrl.onnx.export.ranges import Cut, Feed
from rankrl.onnx.export.static_quantiser import StaticQuantiser
from rankrl.onnx.export.subsampling import store_selections
from rankrl.onnx.export.weight_range import reduces
from rankrl.onnx.graph_edits import without_unused
from rankrl.onnx.operators import dequantises, opset_of, quantises
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import Batch, open_session

_LEAST_OPSET = 13  # the first in which QuantizeLinear has a scale for each channel


def quantise_onnx(
    path: str | Path,
    target: str | Path,
    inputs: Iterable[Batch],
    *,
    weights: Collection[str] | None = None,
    partly: bool = False,
    reduce_range: bool | None = None,
    cut: Cut | None = None,
    fitted: bool = True,
    choice: RangeChoice | None = None,
) -> Path:
    """Write an ONNX file whose convolutions and matrix products compute in 8-bit integers."""
    path, target = Path(path), Path(target)
    copy, quantiser = _prepared(path, inputs, weights, partly, reduce_range, cut)
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
    partly: bool = False,
    reduce_range: bool | None = None,
    cut: Cut | None = None,
) -> RangeChoice:
    """Return how ranges and biases are found best when a network computes in 8-bit integers.

    It serves every file of the network in which some of these nodes do, `quantise_onnx(..., choice=)`: none
    of its inputs is run for them again.
    """
    path = Path(path)
    copy, quantiser = _prepared(path, inputs, weights, partly, reduce_range, cut)
    with _refused(path):
        choice = quantiser.choose()
    return choice.renamed({known: hidden for hidden, known in copy.names.items()})


def _prepared(
    path: Path,
    inputs: Iterable[Batch],
    weights: Collection[str] | None,
    partly: bool,
    reduce_range: bool | None,
    cut: Cut | None,
) -> tuple[QuantiserCopy, StaticQuantiser]:
    """Read and check a file; return the copy that is quantised of it, and what quantises that."""
    session = open_session(path)
    model = _checked_model(path, partly=partly and weights is not None)
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
    """Raise what onnxruntime's Python code stumbles over as an `ExportError`."""
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
    """Hand tensors that are computed in floating point to nodes that compute in it as they are.

    The quantiser rounds a tensor for all that take it as soon as one of them computes in integers.
    """
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
