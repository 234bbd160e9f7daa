"""Check that a network, as read or rewritten for compression, computes the original's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from decomposition import DecompositionError, Inputs, run_model
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Place, leaves, mapped, rows, split
from rankrl.device import model_device
from rankrl.errors import ConfigError, OnnxGraphError
from rankrl.onnx.export.onnx_file import output_names
from rankrl.onnx.graph.calibration import Captured
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork, free_sizes, open_session
from rankrl.onnx.graph.precisions import rounds
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.rewrite import MARKED, replace_node
from rankrl.onnx.graph_edits import without_unused
from rankrl.onnx.protobuf import load_model

AnyArray = TypeVar("AnyArray", "np.ndarray[Any, np.dtype[Any]]", torch.Tensor)
Array = np.ndarray[Any, np.dtype[Any]]

FLOOR = 1e-4
"""The relative error of outputs in float32 that is always allowed: sums in another order."""
COARSE_FLOOR = 2e-2
"""The same where a network rounds by itself: to half precision, or to integers."""
_TIMES_NOISE = 30.0


def departure(
    names: Sequence[str],
    known: Sequence[Array],
    noisy: Sequence[Sequence[Array]],
    computed: Sequence[Array],
    *,
    floor: float = FLOOR,
) -> str | None:
    """Return a message if outputs differ by more than rounding explains, else None."""
    for name, expected, value, *others in zip(names, known, computed, *noisy, strict=True):
        allowed = max(floor, *(_TIMES_NOISE * relative_error(expected, other) for other in others))
        error = relative_error(expected, value)
        if not error <= allowed:  # also true of NaN
            return f"the output {name!r} differs by {error:.2e}, where rounding explains {allowed:.0e}"
    return None


def nudged(x: AnyArray) -> AnyArray:
    """Perturb an input by a few roundings: numbers of 32 bits and more by a millionth."""
    wide = x.dtype in (np.float32, np.float64, torch.float32, torch.float64)
    return x * (1 + 1e-6) if wide else x


def relative_error(expected: Array, computed: Array) -> float:
    """Return |found - expected| / |expected|, of integers the share that differs; infinite between shapes."""
    if expected.shape != computed.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    if expected.dtype.kind not in "f" or computed.dtype.kind not in "f":
        return float(np.mean(expected != computed))
    expected, computed = expected.astype(np.float64), computed.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(computed)):
        return float("inf")
    lost, whole = (np.linalg.norm(each) for each in (computed[finite] - expected[finite], expected[finite]))
    return float(lost / whole) if whole > 0 else float(lost)


def network_outputs(network: nn.Module, inputs: Inputs) -> dict[Place, Array]:
    """Return all tensors that a network returns, in order, as arrays, by their places."""
    device = model_device(network)
    with evaluation_mode(network):
        output = run_model(network, mapped(lambda x: x.to(device), inputs))
    tensors = {place: as_array(y) for place, y in leaves(output) if isinstance(y, Tensor)}
    if not tensors:
        raise ConfigError("the network returns no tensor, so that nothing can be compared; give score=")
    return tensors


def as_array(x: Tensor) -> Array:
    """Return a tensor as an array, in float32 where it is in floating point."""
    array: Array = np.asarray((x.float() if x.is_floating_point() else x).detach().cpu())
    return array


_INPUTS = 4
"""Inputs that are compared: a network that is read wrongly is wrong on any."""


def check_as_read(prepared: PreparedFile) -> None:
    """Refuse a file whose network was read or rewritten wrongly."""
    source = prepared.original.source
    feed = next(prepared.network.axes.parts(prepared.split.heldout[0], _INPUTS))
    dense = _written_anew(prepared)
    content = _content(prepared.original)
    file = GraphSession(open_session(content, source), source)
    plain = GraphSession(open_session(content, source, optimised=False), source)
    floor = COARSE_FLOOR if _rounds(prepared) else FLOOR
    noisy = [plain.run(feed), file.run({name: nudged(value) for name, value in feed.items()})]
    told = departure(
        file.output_names, file.run(feed), noisy, GraphSession(dense, source).run(feed), floor=floor
    )
    if told is None:
        return
    node = _first_departing(source, dense, feed, floor)
    where = "" if node is None else f", first of all that of the node {node!r}"
    converted = f" ({prepared.original.converted})" if prepared.original.converted else ""
    raise OnnxGraphError(
        f"{source} would be compressed as another network than it is: with nothing compressed yet, {told}"
        f"{where}{converted}. Leave that node as it is (skip), or export the network anew, to ONNX's own "
        "operators in a newer operator set"
    )


def _content(network: OnnxNetwork) -> ir.Model | str:
    """Return the path of a file, or its content without sizes of 0 and outputs that are no tensors."""
    model = load_model(network.source)
    return model if free_sizes(model.graph) or network.aside.outputs else network.source


def _written_anew(prepared: PreparedFile) -> ir.Model:
    """Return the network with every compressible node replaced by its own dense layer."""
    model = prepared.network.graph_model()
    for site in prepared.sites:
        if site.spec.refusal is None and not site.hidden:
            replace_node(model, site, [each.module(MARKED) for each in site.nodes], None)
    return without_unused(model)


def _rounds(prepared: PreparedFile) -> bool:
    return bool(prepared.network.half) or any(map(rounds, prepared.network.graph_model().graph.all_nodes()))


def _first_departing(source: str, dense: ir.Model, feed: Feed, floor: float) -> str | None:
    """Return the name of the first node of a file whose output differs in a graph; None for none."""
    file = load_model(source)
    made = {output.name for node in dense.graph for output in node.outputs}
    nodes = {
        str(output.name): node.name or f"{node.op_type} that computes {output.name}"
        for node in file.graph
        for output in node.outputs
        if output.name in made
    }
    try:
        before, after = (Captured(each, list(nodes), source).run(feed) for each in (file, dense))
    except OnnxGraphError:  # a value that is no tensor
        return None
    return next(
        (name for value, name in nodes.items() if not relative_error(before[value], after[value]) <= floor),
        None,
    )


def check_rewritten(model: nn.Module, dense: nn.Module, inputs: Inputs) -> None:
    """Refuse a network whose layers were rewritten wrongly."""
    some = rows(inputs, slice(_INPUTS))
    known = network_outputs(model, some)
    halves = _joined(network_outputs(model, each) for each in split(some, _INPUTS // 2))
    noisy = [halves, network_outputs(model, mapped(nudged, some))]
    names, name = output_names(list(known)), type(model).__name__
    half = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    floor = COARSE_FLOOR if half else FLOOR
    computed = network_outputs(dense, some)
    told = departure(
        names,
        list(known.values()),
        [[_like(y, each.get(place, y)) for place, y in known.items()] for each in noisy],
        [computed.get(place, np.empty(0)) for place in known],
        floor=floor,
    )
    if told is not None:
        layer = _first_departing_module(model, dense, some, floor)
        where = "" if layer is None else f", first of all that of the layer {layer!r}"
        raise DecompositionError(
            f"{name} would be compressed as another network than it is: with nothing compressed yet, "
            f"{told}{where}. Leave that layer as it is (skip), or write it with layers of torch"
        )


def _like(expected: Array, computed: Array) -> Array:
    """Return `computed`, or `expected` if shapes differ, as those of half batches of (layers, N, size) do."""
    return computed if computed.shape == expected.shape else expected


def _joined(parts: Iterable[Mapping[Place, Array]]) -> dict[Place, Array]:
    """Concatenate the outputs of several batches; those without axes are taken from the first."""
    first, *others = parts
    return {
        place: np.concatenate([y, *(each[place] for each in others)]) if y.ndim else y
        for place, y in first.items()
    }


def _first_departing_module(model: nn.Module, dense: nn.Module, inputs: Inputs, floor: float) -> str | None:
    """Return the name of the module of both networks whose first output is the first to differ."""
    with _watched(model) as before, _watched(dense) as after:
        for network in (model, dense):
            network_outputs(network, inputs)
    shared = [name for name in before if name in after]
    return next((name for name in shared if not relative_error(before[name], after[name]) <= floor), None)


@contextmanager
def _watched(network: nn.Module) -> Iterator[dict[str, Array]]:
    """Collect the first output of every module but the network itself, in the order in which they end."""
    seen: dict[str, Array] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, as_array(output))

        return note

    handles = [each.register_forward_hook(hook(name)) for name, each in network.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
