"""Apply plans to graphs: refit every node to the inputs that it receives, write the file, check it.

LSTM nodes that multiply 8-bit integers become onnxruntime's DynamicQuantizeLSTM (specification:
ContribOperators.md of onnxruntime). Inputs and states are rounded to uint8 at every step, in ranges that the
kernel finds there; weights are int8, one scale for each row of a gate. There is no such kernel for GRU and
RNN, which onnxruntime's own dynamic quantiser leaves alone, too.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
import torch
from onnx import version_converter
from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    FitLibrary,
    FitOptions,
    LayerPlan,
    PlanError,
    Quantise,
    without_rounding,
)
from decomposition.calibration.metric import labels_or_single
from decomposition.calibration.moments import PATCHES_PER_LAYER, UNREACHED
from decomposition.fit.refit import Refit, RefitProblem, Solved, refit_to_patches
from decomposition.formats.layers import FactorisedLayer
from decomposition.memory import within_room
from decomposition.network.layers import DecomposableModule, weight_of
from decomposition.network.rounding import REDUCED_BITS
from decomposition.operations import FINAL
from decomposition.plan.apply import fitted_layer
from decomposition.plan.plan import without_growth
from rankrl.errors import OnnxGraphError
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.export.onnx_file import INT4_OPSET, rounded_tensor, store_integers
from rankrl.onnx.export.static_quantiser import RangeChoice
from rankrl.onnx.graph.calibration import FINAL_ELEMENTS, Captured, drawn_patches, in_parts, most_patches
from rankrl.onnx.graph.network import BatchAxes, Feed, GraphSession, OnnxNetwork, open_session
from rankrl.onnx.graph.precisions import HalfValues, in_half, rounds, store_narrow
from rankrl.onnx.graph.rewrite import MARKED, check_formats, replace_node, store_pivoted
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import (
    MICROSOFT,
    Array,
    depending,
    free_ends,
    new_constant,
    opset_of,
    part_of,
    producing,
    set_types,
    used_by,
    without_unused,
)
from rankrl.onnx.protobuf import load_model, save_model, to_proto, write_checked

KEPT = 3 * 2**27
"""Bytes that a walk keeps of the values between two nodes, of all batches together.

A text detector of 64 convolutions wants 0.94 GB for 96 inputs of 480x640 pixels, most of its nodes 0.66 GB;
a refit walks through two graphs at a time.
"""


class GraphWalk:
    """The inputs of the nodes of a graph, each computed from values that were computed before.

    All batches go on to a node before any goes on to the next; batches without room begin again.
    """

    def __init__(
        self, model: ir.Model, sites: Sequence[Site], batches: Sequence[Feed], source: str, room: int = KEPT
    ) -> None:
        self._model, self._batches, self._source = model, batches, source
        self._room = within_room(room, "values between nodes")
        self._ahead = deque(sites)
        self._variable = {str(value.name) for value in depending(model.graph, model.graph.inputs)}
        self._done: set[ir.Node] = set()
        self._kept: list[dict[str, Array]] = [{} for _ in batches]

    def inputs_of(self, site: Site) -> Iterator[dict[str, Array]]:
        """Yield the inputs of a node and of those that share its weight for each batch, by name."""
        names = list(dict.fromkeys(node.input_name for node in site.nodes))
        live = self._go_on_to(site)
        sessions: dict[frozenset[str], GraphSession] = {}
        for index, feed in enumerate(self._batches):
            values = {**feed, **self._kept[index]}
            missing = [name for name in dict.fromkeys([*names, *live]) if name not in values]
            if missing:
                start = frozenset(self._kept[index])
                if start not in sessions:
                    part = part_of(self._model, [*self._model.graph.inputs, *sorted(start)], missing)
                    set_types(part, values)
                    session = open_session(part, self._source)
                    sessions[start] = GraphSession(session, self._source)
                values |= zip(missing, sessions[start].run(values), strict=True)
            self._keep(index, {name: values[name] for name in live if name not in feed})
            yield {name: np.asarray(values[name]) for name in names}

    def _go_on_to(self, site: Site) -> list[str]:
        """Return the names of the values in front of a node that it or a later one depends on."""
        graph = self._model.graph
        values = ir.convenience.create_value_mapping(graph)
        self._done |= producing(graph, [values[site.input_name]])
        while self._ahead.popleft().name != site.name:
            pass
        ends = [values[node.input_name] for later in self._ahead for node in later.nodes]
        left = producing(graph, ends) - self._done
        read = [*ends, *(value for node in left for value in used_by(node, graph))]
        return sorted({str(each.name) for each in read if each.producer() in self._done} & self._variable)

    def _keep(self, index: int, values: dict[str, Array]) -> None:
        """Keep values from which a batch goes on, if there is room and a session takes them."""
        if any(not isinstance(value, np.ndarray) for value in values.values()):  # a sequence
            return
        kept = sum(value.nbytes for value in self._kept[index].values())
        room = self._room + kept - sum(value.nbytes for value in values.values())
        if room >= 0:
            self._room, self._kept[index] = room, values


@dataclass
class CompressedGraph:
    """A graph with its plan carried out, still in floating point."""

    model: ir.Model
    contracted: ir.Model | None = None
    computing: list[str] = field(default_factory=list)
    reduced: bool = False
    stored: dict[str, int] = field(default_factory=dict)
    pivoted: list[str] = field(default_factory=list)
    lstms: list[tuple[Site, int]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    replaced: list[Site] = field(default_factory=list)
    half: HalfValues = field(default_factory=HalfValues)
    narrow: dict[str, ir.DataType] = field(default_factory=dict)
    axes: BatchAxes | None = None

    def put(self, site: Site, layer: nn.Module, plan: Sequence[object], shift: torch.Tensor | None) -> None:
        """Replace a node by a layer and record the precision of its weights."""
        layer = without_rounding(layer)
        layers = [layer, *(_of_twin(layer, twin, plan) for twin in site.twins)]
        written = replace_node(self.model, site, layers, shift)
        names = {key: str(value.name) for key, value in written.items()}
        weights = [name for key, name in names.items() if key.endswith("weight")]
        if not any(isinstance(operation, Quantise) for operation in plan):
            kinds = {name: site.narrow.get(key.split()[-1]) for key, name in names.items()}
            self.narrow |= {name: kind for name, kind in kinds.items() if kind is not None}
        self.replaced += site.nodes
        if isinstance(layer, FactorisedLayer) and layer.pivoted:
            self.pivoted += weights[-1:]
        for operation in plan:
            if isinstance(operation, Quantise):
                if operation.integer:
                    self.computing += weights
                    self.reduced |= operation.weight_bits == REDUCED_BITS
                else:
                    self.stored |= dict.fromkeys(weights, operation.weight_bits)
        if self.contracted is not None:
            dense = [layer.to_dense() if isinstance(layer, FactorisedLayer) else layer for layer in layers]
            replace_node(self.contracted, site, dense, shift)

    def round_lstms(self, sites: Sequence[Site], plan: CompressionPlan) -> None:
        """Record the LSTMs that a plan quantises; their nodes stay in this graph."""
        for site in sites:
            rounding = plan[site.name].operation(Quantise) if site.hidden else None
            if rounding is not None and site.spec.refusal is None:
                self.lstms.append((site, rounding.weight_bits))


def check_plan(plan: CompressionPlan, sites: Sequence[Site], source: str) -> None:
    """Refuse a plan that cannot be carried out on a network in an ONNX file."""
    specs = plan.check_specs(site.spec for site in sites)
    missing = [name for name in specs if name not in {layer.name for layer in plan}]
    if missing:
        raise PlanError(
            f"the plan says nothing of {', '.join(missing[:5])} of {source}; give an entry to each"
        )
    spreading = {site.name for site in sites if site.spread}
    for layer in plan:
        spec = specs[layer.name]
        if layer.operations and spec.refusal is not None:
            raise PlanError(
                f"the plan changes {layer.name!r} of {source}, which cannot be done: {spec.refusal}; leave "
                "its operations empty"
            )
        for operation in layer.operations:
            if not isinstance(operation, Factorise | Quantise):
                raise PlanError(
                    f"the plan does {operation.kind!r} with {layer.name!r}; nodes of an ONNX file can be "
                    "factorised and rounded, nothing else"
                )
            if isinstance(operation, Factorise):
                check_formats((operation.format,))
                form = operation.tensor_format.form(spec, operation.modes(spec), operation.ranks)
                if not form.as_nodes:
                    raise PlanError(
                        f"the plan factorises {layer.name!r} as {operation}, which is no row of convolutions "
                        "and matrix products here, so that it cannot become nodes; choose other ranks or "
                        "another format"
                    )
                if not form.spreads and layer.name in spreading:
                    raise PlanError(
                        f"the plan factorises {layer.name!r}, a transposed convolution, as "
                        f"{operation.format}, which has no last factor to spread; choose tucker, the same "
                        "product"
                    )
            if isinstance(operation, Quantise) and layer.name in spreading:
                raise PlanError(
                    f"the plan rounds {layer.name!r}, a transposed convolution, to integers, which nothing "
                    "computes with or stores an output channel at a time; leave its weights in float32"
                )
            operation.check(spec)


def refitted_graph(
    network: OnnxNetwork,
    sites: Sequence[Site],
    plan: CompressionPlan,
    batches: Sequence[Feed],
    *,
    sensitivities: Mapping[str, torch.Tensor],
    options: FitOptions = FINAL,
    starts: FitLibrary | None = None,
    patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CompressedGraph:
    """Return the graph under a plan, every node fitted to the inputs that it receives in it.

    `starts` are the fits to the original's inputs that the nodes' fits begin with.
    """
    graph = CompressedGraph(
        network.graph_model(), network.graph_model(), half=network.half, axes=network.axes
    )
    graph.round_lstms(sites, plan)
    usable = [site for site in sites if site.spec.refusal is None and not site.hidden]
    parts = in_parts(network.axes, usable, batches)
    sizes = [network.axes.size(part) for part in parts]
    before, after = (
        GraphWalk(model, usable, parts, network.source) for model in (network.graph_model(), graph.model)
    )
    touched = False
    for site in usable:
        entry = without_growth(plan[site.name], site.spec)
        # An unchanged node with unchanged inputs needs no fit; other dense ones make up for errors before
        # them, unless new weights would take more bytes than the file's, as those of sparse ones do.
        touched = touched or any(map(_loses, entry.layer_operations))
        fitted = touched and (bool(entry.layer_operations) or site.spec.storage.whole is None)
        if fitted or any(map(_stores, entry.layer_operations)):
            arriving = _arriving_patches(before, after, site, sizes, patches, seed)
            if len(arriving[0]):
                refit = _refit(site, entry, sensitivities.get(site.name), options, starts)
                absorbed = site.absorber is not None
                result = refit_to_patches(site.name, site.module(), refit, *arriving, mean_absorbed=absorbed)
                graph.put(site, result.module, entry.layer_operations, result.shift if absorbed else None)
                graph.errors[site.name] = result.error
            elif entry.layer_operations:
                raise PlanError(
                    f"the plan changes {site.name!r} of {network.source}, and {UNREACHED}; give inputs that "
                    "do, or leave its operations empty"
                )
        elif entry.layer_operations:
            graph.put(site, site.module(MARKED), entry.layer_operations, None)
        if progress is not None:
            progress(site.name)
    without_unused(graph.model)
    if graph.contracted is not None:
        without_unused(graph.contracted)
    return graph


def _loses(operation: object) -> bool:
    """Tell whether an operation changes a node's output by more than a rounding to 8 bits does."""
    return not isinstance(operation, Quantise) or operation.weight_bits < REDUCED_BITS


def _stores(operation: object) -> bool:
    """Tell whether weights are stored in integers while the node computes in float32."""
    # The rounding error times the inputs' mean shifts the output, which the bias has to take up; where inputs
    # are rounded, too, the quantiser corrects it (`rankrl.onnx.export.static_quantiser`).
    return isinstance(operation, Quantise) and not operation.integer


def structured_graph(
    network: OnnxNetwork, sites: Sequence[Site], plan: CompressionPlan, library: FitLibrary
) -> CompressedGraph:
    """Return the graph under a plan with the fits that the plan was chosen by, to time it."""
    graph = CompressedGraph(network.graph_model(), half=network.half, axes=network.axes)
    graph.round_lstms(sites, plan)
    for site in sites:
        if site.spec.refusal is not None or site.hidden:
            continue
        entry = without_growth(plan[site.name], site.spec)
        if not entry.layer_operations:
            continue
        layer: nn.Module = site.module(MARKED)
        for operation in entry.layer_operations:
            bias = getattr(layer, "bias", None)
            layer = operation.structure(layer, site.spec)
            if isinstance(operation, Factorise) and isinstance(layer, FactorisedLayer):
                layer.load(library.fit(site.name, operation).cores, bias)
        graph.put(site, layer, entry.layer_operations, None)
    without_unused(graph.model)
    return graph


def _of_twin(layer: nn.Module, twin: Site, plan: Sequence[object]) -> nn.Module:
    """Return the layer for a node that shares the weight, with strides and padding of its own."""
    dense = twin.module(MARKED)
    bias = getattr(layer, "bias", None)
    if isinstance(layer, FactorisedLayer):
        operation = next(operation for operation in plan if isinstance(operation, Factorise))
        like = operation.structure(dense, twin.spec)
        assert isinstance(like, FactorisedLayer)
        like.load([core.detach() for core in layer.cores()], bias, layer.error)
        return like
    with torch.no_grad():
        dense.weight.copy_(weight_of(cast(DecomposableModule, layer)).reshape(dense.weight.shape))
        if bias is not None and dense.bias is not None:
            dense.bias.copy_(bias)
    return dense


def _refit(
    site: Site,
    entry: LayerPlan,
    sensitivity: torch.Tensor | None,
    options: FitOptions,
    starts: FitLibrary | None,
) -> Refit:
    """Return the fit of a node: of its operations, or of the dense layer that it stays."""
    dense = site.module(MARKED)
    if not entry.layer_operations:
        return Solved(dense, dense.weight[0].numel())

    factors = entry.operation(Factorise)

    def refit(problem: RefitProblem) -> tuple[nn.Module, torch.Tensor]:
        if starts is not None and factors is not None:
            problem = replace(problem, start=starts.fit(site.name, factors).cores)
        fitted = fitted_layer(dense, entry, site.spec, problem, sensitivity, options)
        return fitted.module, fitted.weight

    return refit


def _arriving_patches(
    before: GraphWalk, after: GraphWalk, site: Site, sizes: Sequence[int], most: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the same patches of a node's input from both graphs."""
    generator = torch.Generator().manual_seed(seed)
    layers = [node.module() for node in site.nodes]
    *starts, total = accumulate(sizes, initial=0)
    patches: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    labels: list[torch.Tensor] = []
    for start, size, *received in zip(
        starts, sizes, before.inputs_of(site), after.inputs_of(site), strict=True
    ):
        share = max(1, most_patches(site, FINAL_ELEMENTS, most) * size // total // len(layers))
        for node, layer in zip(site.nodes, layers, strict=True):
            values = [inputs[node.input_name] for inputs in received]
            drawn, label = drawn_patches(node, layer, values, share, generator, size)
            for part, matrix in zip(patches, drawn, strict=True):
                part.append(matrix)
            labels.append(label + start)
    matrices = []
    for part in patches:  # each is free before the next matrix is made
        matrices.append(torch.cat(part))
        part.clear()
    return matrices[0], matrices[1], labels_or_single(torch.cat(labels), total)


_PLACES = {"weight": 1, "state": 2}
"""Which inputs are the weights."""
_OTHERS = 8
"""Inputs of an LSTM, those that it does without among them; scales and zero points come after them."""


def quantise_lstms(model: ir.Model, lstms: Sequence[tuple[Site, int]]) -> None:
    """Replace LSTM nodes by DynamicQuantizeLSTM with weights of the given bits."""
    graph, nodes = model.graph, {node.name: node for node in model.graph}
    for site, bits in lstms:
        node = nodes[site.name]
        inputs = [*node.inputs, *[None] * (_OTHERS - len(node.inputs))]
        for (kind, place), weight in zip(_PLACES.items(), site.recurrent_weights(site.weight), strict=True):
            integers, scales = _rounded(weight.numpy(), bits)
            inputs[place] = new_constant(graph, f"{site.name}.{kind}_integers", integers)
            zeros = np.zeros(scales.shape, np.int8)
            inputs += [
                new_constant(graph, f"{site.name}.{kind}_{what}", values)
                for what, values in (("scales", scales), ("zeros", zeros))
            ]
        attributes = [value for key, value in node.attributes.items() if key != "layout"]
        outputs = [ir.Value(name=old.name, type=old.type, shape=old.shape) for old in node.outputs]
        dynamic = ir.Node(
            MICROSOFT, "DynamicQuantizeLSTM", inputs, attributes, name=node.name, outputs=outputs
        )
        ir.convenience.replace_nodes_and_values(graph, node, [node], [dynamic], node.outputs, outputs)
    if lstms:
        model.opset_imports.setdefault(MICROSOFT, 1)
        without_unused(model)


def _rounded(weight: Array, bits: int) -> tuple[Array, Array]:
    """Return a weight in integers, (directions, columns, rows) as the kernel takes it, and its scales."""
    directions, rows, columns = weight.shape
    integers, scales = rounded_tensor(ir.tensor(weight.reshape(-1, columns)), bits, 0)
    turned = integers.numpy().reshape(weight.shape).transpose(0, 2, 1)
    return np.ascontiguousarray(turned), scales.reshape(directions, rows)


TOLERANCE = 1e-3
"""The largest difference that factorised nodes and dense ones of their contracted weights may make at the
outputs, as a share of the largest number there: sums in another order."""


def write_graph(
    graph: CompressedGraph,
    path: Path,
    calibration: Sequence[Feed],
    *,
    reduce_range: bool | None = None,
    fitted: bool = True,
    choice: RangeChoice | None = None,
) -> None:
    """Write a compressed graph; the file appears complete or not at all."""
    model = in_half(graph.model, graph.half, "the compressed network") if graph.half else graph.model.clone()
    if 4 in graph.stored.values():
        model = _with_int4(model)
    store_integers(model, graph.stored)
    with tempfile.TemporaryDirectory() as folder:
        if graph.computing:
            scratch = Path(folder) / "graph.onnx"
            save_model(model, scratch)
            quantise_onnx(
                scratch,
                scratch,
                calibration,
                weights=graph.computing,
                reduce_range=graph.reduced or reduce_range,
                cut=None if graph.axes is None else graph.axes.parts,
                fitted=fitted,
                choice=choice.without_values() if choice is not None and graph.errors else choice,
            )
            model = load_model(scratch)
        quantise_lstms(model, graph.lstms)
        rows = store_pivoted(model, graph.pivoted)
        store_narrow(model, {rows.get(name, name): kind for name, kind in graph.narrow.items()})
        write_checked(model, path, "the compressed network")


def _with_int4(model: ir.Model) -> ir.Model:
    opset = opset_of(model)
    if opset >= INT4_OPSET:
        return model
    try:
        return ir.from_proto(version_converter.convert_version(to_proto(model), INT4_OPSET))
    except Exception as error:  # the converter's own, and those of what it does not know
        raise OnnxGraphError(
            f"the file has opset {opset}; weights of 4 bits need {INT4_OPSET}, to which onnx cannot convert "
            f"it ({error}). Take int8_weights, or export the network anew"
        ) from error


def check_contracted(graph: CompressedGraph, batches: Sequence[Feed], source: str) -> float:
    """Compare a graph with the one that has dense nodes of the contracted weights."""
    assert graph.contracted is not None
    largest = 0.0
    for name, output, expected in _outputs_of_both(graph, graph.contracted, batches, source):
        if output.dtype.kind != "f" or not output.size:
            continue
        scale = max(1e-30, float(np.abs(expected).max()))  # zeros have no scale
        difference = float(np.abs(output - expected).max()) / scale
        if not difference <= TOLERANCE:  # also true of NaN
            raise OnnxGraphError(
                f"the output {name!r} of the compressed {source} differs by {difference:.2e} from what "
                f"its factors contract to; at most {TOLERANCE:.0e} is accepted. Take another format"
            )
        largest = max(largest, difference)
    return largest


def _outputs_of_both(
    graph: CompressedGraph, contracted: ir.Model, batches: Sequence[Feed], source: str
) -> Iterator[tuple[str, Array, Array]]:
    """Yield outputs of a graph and of the contracted one, by name; where it rounds, of single nodes."""
    if not any(map(rounds, graph.model.graph.all_nodes())):
        sessions = [GraphSession(model, source) for model in (graph.model, contracted)]
        for feed in batches:
            yield from zip(
                sessions[0].output_names, *(session.run(feed) for session in sessions), strict=True
            )
        return
    # The order of a sum decides whole steps at the outputs: nodes are compared on the inputs they receive.
    for node in graph.replaced:
        ends = [node.input_name, node.output_name]
        captured = Captured(graph.model, ends, source)
        part = part_of(contracted, ends[:1], ends[1:])
        free_ends(part)
        dense = GraphSession(part, source)
        for feed in batches:
            values = captured.run(feed)
            yield ends[1], values[ends[1]], dense.run(values)[0]
