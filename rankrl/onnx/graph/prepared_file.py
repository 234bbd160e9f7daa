"""Prepare an ONNX file for compression: inputs, nodes, costs, look-ups, nodes that bar integers."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from decomposition import CompressionPlan
from decomposition.network.layers import skipping
from decomposition.operations import dense_cost
from decomposition.plan.plan import without_growth
from rankrl.errors import DefectError, ExportError, OnnxGraphError, counted
from rankrl.onnx.export.int8 import choose_ranges, quantise_onnx
from rankrl.onnx.export.static_quantiser import RangeChoice
from rankrl.onnx.graph.calibration import check_gaps
from rankrl.onnx.graph.inputs import (
    HELDOUT,
    Batches,
    ImagePreprocessing,
    SplitInputs,
    read_inputs,
    split_inputs,
)
from rankrl.onnx.graph.network import Axes, Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.precisions import constant, packed, parameters_of
from rankrl.onnx.graph.rewrite import PositionsByNode, with_several_positions
from rankrl.onnx.graph.sites import Site, find_sites, foreign_reason, is_foreign, use_counts
from rankrl.onnx.graph_edits import (
    Array,
    dequantises,
    free_ends,
    free_name,
    is_standard,
    new_constant,
    part_of,
    put_in_place,
    without_unused,
)

log = logging.getLogger(__name__)


def without_integers(network: OnnxNetwork, sites: Sequence[Site], feed: Feed) -> list[str]:
    """Return the names of the nodes without which all others can compute in integers together."""
    feed = network.axes.one(feed)
    network = network.without_casts()
    weights = network.weight_inputs
    taken = [site for site in sites if not site.spread]  # onnxruntime has no such kernel
    spread = [site.name for site in sites if site.spread]
    with tempfile.TemporaryDirectory() as folder:
        plain, rounded = Path(folder) / "plain.onnx", Path(folder) / "rounded.onnx"
        network.save(plain)

        def fails(names: Sequence[str]) -> bool:
            try:  # onnxruntime refuses files that its own rewriting around integer nodes makes invalid
                own = {weights[name] for name in names}
                quantise_onnx(plain, rounded, [feed], weights=own, fitted=False)
                OnnxNetwork.load(rounded).session().run(feed)
            except (DefectError, ExportError, OnnxGraphError) as error:
                log.debug("%s in integers: %s", ", ".join(names), error)
                return True
            return False

        return spread + failing_names(
            [site.name for site in taken],
            fails,
            lambda name: log.warning(
                "onnxruntime cannot compute %s in integers; it stays in floating point", name
            ),
        )


def failing_names(
    names: Sequence[str], fails: Callable[[Sequence[str]], bool], tell: Callable[[str], None]
) -> list[str]:
    """Return the names without which the others pass: all are tried, then halves of those that fail."""
    passing: list[str] = []
    failing: list[str] = []
    waiting = [list(names)] if names else []
    while waiting:
        tried = waiting.pop()
        if not fails([*passing, *tried]):
            passing += tried
        elif len(tried) == 1:
            failing += tried
            tell(tried[0])
        else:
            middle = len(tried) // 2
            waiting += [tried[middle:], tried[:middle]]
    return failing


def chosen_ranges(
    network: OnnxNetwork, names: Sequence[str], batches: Sequence[Feed], reduce_range: bool | None
) -> RangeChoice:
    """Choose ranges with all nodes in integers that can compute in them (`choose_ranges`)."""
    network = network.without_casts()
    weights = {network.weight_inputs[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        network.save(plain)
        return choose_ranges(
            plain, batches, weights=weights, reduce_range=reduce_range, cut=network.axes.parts
        )


def network_costs(network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, int]:
    """Count parameters (floats and integer weights), multiply-accumulates of one input, and stored bytes."""
    integers = {site.name for site in sites if site.spec.refusal is not None}
    params = size = 0
    graph = network.model.graph
    weights = _integer_weights(graph, integers)
    tensors = [*graph.initializers.tensor_items()]
    for node in graph:
        if is_standard(node, "Constant") and "value" in node.attributes:
            tensors.append((str(node.outputs[0].name), node.attributes["value"].as_tensor()))
    for name, tensor in tensors:
        if tensor.dtype.is_floating_point() or name in weights:
            params += tensor.size * weights.get(name, 1)
            size += network.stored_bytes(name, tensor)
    return {"params": params, "macs": sum(site.spec.macs for site in sites), "bytes": size}


def compression_costs(network: OnnxNetwork, sites: Sequence[Site]) -> dict[str, int]:
    """Count a network as plans change it: biases that several nodes share count once for each of them."""
    costs, uses = network_costs(network, sites), use_counts(network.model.graph)
    for site in sites:
        if site.spec.refusal is None and site.bias is not None and uses[site.bias_name] > len(site.nodes):
            costs["bytes"] += site.spec.storage.bias * site.spec.out_channels
    return costs


def plan_costs(totals: Mapping[str, int], sites: Sequence[Site], plan: CompressionPlan) -> dict[str, int]:
    """Return the costs of a network under a plan, counted like `totals` (`compression_costs`)."""
    costs = dict(totals)
    for site in sites:
        if site.spec.refusal is not None:
            continue
        before = dense_cost(site.spec)
        after = without_growth(plan[site.name], site.spec).cost(site.spec)
        costs["params"] += after.params - before.params
        costs["macs"] += after.macs - before.macs
        costs["bytes"] += after.bytes - before.bytes
    return costs


def _integer_weights(graph: ir.Graph, names: set[str]) -> dict[str, int]:
    """Return the parameters per element of constants that the named nodes or DequantizeLinear read."""
    packed_counts = {str(node.inputs[0].name): 1 for node in graph if dequantises(node) and node.inputs[0]}
    for node in graph:
        if node.name in names:
            packed_counts |= dict.fromkeys(parameters_of(node), packed(node))
    return packed_counts


# fmt: off
_ELEMENTWISE = {
    "Abs", "Add", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid",
    "Softplus", "Softsign", "Sqrt", "Sub", "Tanh",
}
# fmt: on


@dataclass(frozen=True)
class _OneHot:
    """A one-hot code along the last axis."""

    index: ir.Value
    classes: int


def with_look_ups(network: OnnxNetwork) -> OnnxNetwork:
    """Return a network in which products with a one-hot code are look-ups; the same one if it has none."""
    model = network.graph_model()
    products = [node for node in model.graph if is_standard(node, "MatMul") and _one_hot(node.inputs[0])]
    if not products:
        return network
    passes.ShapeInferencePass()(model)
    replaced = [_replace(model, product, network.source) for product in products]
    if not any(replaced):
        return network
    return network.rewritten(without_unused(model))


def _replace(model: ir.Model, product: ir.Node, source: str) -> bool:
    """Replace a product with a one-hot code by a look-up; tell whether it was one."""
    code, weight = _one_hot(product.inputs[0]), constant(product.inputs[1])
    if code is None or weight is None or weight.dtype != np.float32:
        return False
    axes = product.outputs[0].shape
    if weight.ndim != 2 or len(weight) != code.classes or axes is None or code.index.shape is None:
        return False
    if len(code.index.shape) != len(axes):
        return False
    graph, name = model.graph, f"{product.name}/look_up"
    old = _function_of_row(graph, product.outputs[0], weight.shape[1], len(axes))
    none = np.zeros((1, weight.shape[1]), np.float32)
    table = _mapped(model, product.outputs[0], old, np.concatenate([weight, none]), source)
    # The last row is that of no class: a larger index is cut to it, a negative one counts from behind.
    constants = {"axis": [-1], "least": -1, "most": code.classes}
    axis, least, most = (
        new_constant(graph, f"{name}.{key}", np.array(value, np.int64)) for key, value in constants.items()
    )
    nodes = [ir.node("Squeeze", [code.index, axis], name=f"{name}_squeeze")]
    nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(ir.DataType.INT64)}, name=f"{name}_cast"))
    nodes.append(ir.node("Clip", [nodes[-1].outputs[0], least, most], name=f"{name}_clip"))
    rows = new_constant(graph, f"{name}.table", table)
    nodes.append(ir.node("Gather", [rows, nodes[-1].outputs[0]], {"axis": 0}, name=name))
    for node in nodes:
        node.outputs[0].name = free_name(graph, f"{node.name}_output")
    last = old.producer()
    assert last is not None
    put_in_place(graph, [last], nodes)
    return True


def _one_hot(value: ir.Value | None) -> _OneHot | None:
    """Return a value's one-hot code, a comparison with 0, 1, 2, ... along the last axis, else None."""
    producer = None if value is None else value.producer()
    while producer is not None and is_standard(producer, "Cast") and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    if producer is None or not is_standard(producer, "Equal"):
        return None
    for index, other in (producer.inputs, producer.inputs[::-1]):
        classes = constant(other)
        if index is None or classes is None or classes.dtype.kind not in "iu" or classes.size < 2:
            continue
        last = classes.ndim > 0 and classes.shape[-1] == classes.size
        if last and np.array_equal(classes.reshape(-1), np.arange(classes.size)):
            return _OneHot(index, classes.size)
    return None


def _function_of_row(graph: ir.Graph, product: ir.Value, width: int, axes: int) -> ir.Value:
    """Return the last elementwise function of a product alone; nothing else uses the values between."""
    sources: dict[ir.Value, set[ir.Value]] = {product: set()}  # of each, the ones that it is computed from
    for node in graph:
        others = [value for value in node.inputs if value is not None and value not in sources]
        inside = {value for value in node.inputs if value is not None and value in sources}
        if (
            inside
            and is_standard(node, *_ELEMENTWISE)
            and all(_along_row(value, width, axes) for value in others)
        ):
            sources[node.outputs[0]] = inside.union(*(sources[value] for value in inside))
    for value, within in reversed(sources.items()):
        if all(_only_within(inner, within | {value}) for inner in within):
            return value
    return product


def _along_row(value: ir.Value, width: int, axes: int) -> bool:
    """Tell whether a value is one constant, or one for each element of a row, that adds no axes."""
    array = constant(value)
    if array is None or array.ndim > axes:
        return False
    return array.size == 1 or (array.size == width and array.shape[-1] == width)


def _only_within(value: ir.Value, values: set[ir.Value]) -> bool:
    """Tell whether a value is used only to compute the given others."""
    return not value.is_graph_output() and all(use.node.outputs[0] in values for use in value.uses())


def _mapped(model: ir.Model, start: ir.Value, end: ir.Value, rows: Array, source: str) -> Array:
    """Compute a value of a graph from rows put in the place of another value."""
    if start is end:
        return rows
    part = part_of(model, [str(start.name)], [str(end.name)])
    free_ends(part)
    for value in (value for node in part.graph for value in node.outputs):
        value.shape = None  # there are other axes in front
    mapped = GraphSession(part, source).run({str(start.name): rows})[0]
    return mapped.reshape(rows.shape)


FileInputs = Batches | str | Path


@dataclass(frozen=True)
class PreparedFile:
    """A network read from an ONNX file, with its inputs, its nodes and their costs."""

    original: OnnxNetwork
    network: OnnxNetwork
    split: SplitInputs
    sites: tuple[Site, ...]
    totals: Mapping[str, int]
    several: PositionsByNode = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        path: str | Path,
        inputs: FileInputs,
        *,
        images: ImagePreprocessing | None = None,
        batch_axes: Axes | None = None,
        heldout: float = HELDOUT,
        scored: float = 0.0,
        skip: Sequence[str] = (),
        only: Sequence[str] = (),
        look_ups: bool = True,
        seed: int = 0,
    ) -> PreparedFile:
        original = OnnxNetwork.load(path).in_float32()
        held = read_inputs(inputs, original, images) if isinstance(inputs, str | Path) else inputs
        split = split_inputs(held, original, batch_axes=batch_axes, heldout=heldout, scored=scored, seed=seed)
        original = original.with_axes(split.axes)
        network = with_look_ups(original) if look_ups else original
        network = network.without_casts((ir.DataType.DOUBLE,))
        sites = find_sites(network, split.calibration[0])
        specs = skipping([site.spec for site in sites], skip, only)
        sites = [replace(site, spec=spec) for site, spec in zip(sites, specs, strict=True)]
        file = cls(original, network, split, tuple(sites), compression_costs(network, sites))
        if file.foreign is not None:
            log.warning("%s: %s", path, file.foreign)
        return file

    def with_several_positions(self, several: PositionsByNode) -> PreparedFile:
        if not several:
            return self
        network = with_several_positions(self.network, self.sites, several)
        refusals = {site.name: site.spec.refusal for site in self.sites}
        sites = [
            replace(site, spec=replace(site.spec, refusal=refusals[site.name]))
            for site in find_sites(network, self.split.calibration[0])
        ]
        return replace(
            self,
            network=network,
            sites=tuple(sites),
            totals=compression_costs(network, sites),
            several=several,
        )

    @property
    def changing(self) -> list[Site]:
        """The nodes that can be compressed, at least one: those that formats replace, and LSTMs."""
        sites = [site for site in self.sites if site.spec.refusal is None]
        if not sites:
            reasons = "; ".join(f"{site.name}: {site.spec.refusal}" for site in self.sites[:5])
            raise OnnxGraphError(
                f"{self.network.source} has no node that can be compressed "
                f"({reasons or 'no Conv, Gemm or MatMul with a constant weight'})"
            )
        return sites

    @property
    def usable(self) -> list[Site]:
        """The nodes that formats can replace."""
        return [site for site in self.changing if not site.hidden]

    def check_gaps(self) -> None:
        split = self.split
        sites = [site for site in self.sites if site.spec.refusal is None]
        check_gaps(self.network, sites, [*split.calibration, *split.scored, *split.heldout])

    @cached_property
    def unrounded(self) -> list[str]:
        """Names of usable nodes that cannot compute in integers (`without_integers`)."""
        return without_integers(self.network, self.usable, self.split.calibration[0])

    @cached_property
    def foreign(self) -> str | None:
        """A warning of nodes that hold weights but are no operators of ONNX; None without any."""
        nodes = {node.name: node for node in self.network.graph_model().graph}
        names = [site.name for site in self.sites if is_foreign(nodes.get(site.name))]
        if not names:
            return None
        among = f", {names[0]!r} among them" if len(names) > 1 else f", {names[0]!r}"
        reason = foreign_reason(nodes[names[0]])
        return f"{counted(len(names), 'node')} with weights must stay{among}: {reason}"

    @cached_property
    def original_sites(self) -> list[Site]:
        if self.original is self.network:
            return list(self.sites)
        return find_sites(self.original, self.split.calibration[0])

    @property
    def looked_up(self) -> list[Site]:
        left = {site.name for site in self.sites}
        return [site for site in self.original_sites if site.name not in left]

    @property
    def rewritten(self) -> dict[str, str]:
        changes = {site.name: "a look-up" for site in self.looked_up}
        return changes | {name: f"{way.positions} positions at once" for name, way in self.several.items()}

    @cached_property
    def original_totals(self) -> dict[str, int]:
        return network_costs(self.original, self.original_sites)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Convert fractions of the original's costs to fractions of the rewritten network's."""
        ratios = {name: self.original_totals[name] / max(1, self.totals[name]) for name in self.totals}
        return {
            name: None if value is None else min(1.0, value * ratios[name]) for name, value in kept.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input for one input of the network, as plans record it."""
        first = self.network.inputs[0].name
        shape, axis = self.split.calibration[0][first].shape, self.network.axes.inputs[first]
        return (shape if axis is None else shape[:axis] + shape[axis + 1 :]) or (1,)

    def feed(self, batch: int) -> Feed:
        """Return a batch of real inputs of a given size, or of the file's own where that is fixed."""
        split, axes = self.split, self.split.axes
        first = split.calibration[0]
        if axes.fixed is not None:
            return first
        every = (*split.calibration, *split.scored, *split.heldout)
        whole = axes.joined([feed for feed in every if axes.kind(feed) == axes.kind(first)])
        return axes.rows(whole, np.arange(batch) % axes.size(whole))
