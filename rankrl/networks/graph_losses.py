"""Measure the loss at a network's outputs when one node of an ONNX graph gets another weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from decomposition import CandidateSet, Factorise, FitLibrary, Quantise
from decomposition.cache import Cache, digest
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import OPAQUE_KINDS
from decomposition.operations import ACTIVATION_NOISE, Operation
from rankrl.networks.graph_scoring import NumberedAnswers, constants_of
from rankrl.onnx.graph.calibration import Captured, behind, first_inputs, fitting_inputs
from rankrl.onnx.graph.compressed import quantise_lstms
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.rewrite import open_constants
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import Array, is_standard, names_in, new_name, set_types
from rankrl.onnx.output_scores import OutputScore, mean_loss
from rankrl.verify.agreement import output_scores

_STEPS = 255  # between the ends of a uint8 range


class NodeTail:
    """The part of a graph behind the input of a node, with the node's input, weight and mean as inputs.

    A node that shares its weight with others has the whole network behind it, and its input stays as it is.
    All values that the inputs lead to are kept, for up to 64 inputs of small networks and 8 of large ones.
    """

    def __init__(
        self,
        network: OnnxNetwork,
        node: Site,
        feeds: Sequence[Feed],
        readers: Collection[str],
        scores: Mapping[str, OutputScore],
    ) -> None:
        self._node, self._scores, self._axes = node, scores, network.axes
        model = network.graph_model()
        self._alone = len(node.nodes) == 1
        self._low, self._rounds_output = _rounding_behind(model.graph, node, readers)
        part_and_others = behind(model, node.input_name) if self._alone else (network.graph_model(), [])
        self._session: GraphSession | None = None
        if part_and_others is None:
            return
        part, others = part_and_others
        self._values = [dict(feed) for feed in feeds]
        if self._alone:
            captured = Captured(model, [node.input_name, *others], network.source)
            self._values = [captured.run(feed) for feed in feeds]
            set_types(part, self._values[0])
        self._opened = open_constants(part, node)
        for name in filter(None, (self._opened.weight, self._opened.mean)):
            entry = part.graph.initializers.pop(name)
            entry.const_value, entry.type = None, ir.TensorType(ir.DataType.FLOAT)
            part.graph.inputs.append(entry)
        self._reached = [str(output.name) for output in part.graph.outputs]
        if self._alone:
            self._open_ends(part.graph)
        self._session = GraphSession(part, network.source)

    def _open_ends(self, graph: ir.Graph) -> None:
        """Make the node's input a graph input, add another to its output, and make that a graph output."""
        node = next(node for node in graph if node.name == self._node.name)
        taken = names_in(graph)
        kind = ir.TensorType(ir.DataType.FLOAT)
        own, added = (ir.val(new_name(f"{node.name}.{what}", taken), type=kind) for what in ("own", "added"))
        graph.inputs.extend([own, added])
        node.replace_input_with(0, own)
        output = node.outputs[0]
        total = ir.node(
            "Add", [output, added], outputs=[ir.val(new_name(f"{output.name}.sum", taken), type=kind)]
        )
        for user, index in tuple(output.uses()):
            if user is not total:
                user.replace_input_with(index, total.outputs[0])
        for position, value in enumerate(graph.outputs):
            if value is output:
                graph.outputs[position] = total.outputs[0]
        graph.insert_after(node, total)
        output.type, output.shape = kind, None
        graph.outputs.append(output)
        self._own, self._added = str(own.name), str(added.name)

    def losses(
        self, library: FitLibrary, weights: Sequence[torch.Tensor], integer: Sequence[bool]
    ) -> list[float]:
        """Return the loss under each weight; see `NodeLosses.of`."""
        if self._session is None:
            return [0.0] * len(weights)
        node, session = self._node, self._session
        original = constants_of(library, node, self._opened, library.weights[node.name])
        plain = [self._run(session, values, original) for values in self._values]
        if self._alone:
            x = [values[node.input_name] for values in self._values]
            taken, returned = _range(x), _range([outputs[-1] for outputs in plain])
            returned = (max(returned[0], self._low), returned[1])
        losses = []
        reached = [self._scores[name] for name in self._reached]
        for weight, rounds in zip(weights, integer, strict=True):
            constants = constants_of(library, node, self._opened, weight)

            def after(values: Feed, constants: Feed = constants, rounds: bool = rounds) -> list[Array]:
                if not rounds or not self._alone:
                    return self._run(session, values, constants)
                own = _rounded(values[node.input_name], taken)
                outputs = self._run(session, values, constants, own=own)
                if not self._rounds_output:
                    return outputs
                added = _rounded(outputs[-1], returned) - outputs[-1]
                return self._run(session, values, constants, own=own, added=added)

            pairs = zip(plain, self._values, strict=True)
            answers = (
                (self._of_network(before), self._of_network(after(values))) for before, values in pairs
            )
            # Outputs that are not reached lose nothing.
            losses.append(mean_loss(reached, answers) * len(reached) / len(self._scores))
        return losses

    def _of_network(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the network's outputs, inputs on the first axis."""
        pairs = zip(self._reached, outputs, strict=False)
        return [np.atleast_1d(self._axes.first_axis(name, output)) for name, output in pairs]

    def _run(
        self,
        session: GraphSession,
        values: Feed,
        constants: Feed,
        *,
        own: Array | None = None,
        added: Array | None = None,
    ) -> list[Array]:
        feed = {**values, **constants}
        if self._alone:
            feed[self._own] = values[self._node.input_name] if own is None else own
            feed[self._added] = np.zeros(1, np.float32) if added is None else added
        return session.run(feed)


def _rounding_behind(graph: ir.Graph, node: Site, readers: Collection[str]) -> tuple[float, bool]:
    """Return the lower clipping bound of a node's output, and whether nodes read it that do not round it."""
    value = next(each for each in graph if each.name == node.name).outputs[0]
    low, uses = -np.inf, tuple(value.uses())
    if len(uses) == 1 and is_standard(uses[0].node, "Relu") and not value.is_graph_output():
        value, low = uses[0].node.outputs[0], 0.0  # the quantiser rounds once, behind the ReLU
    return low, value.is_graph_output() or any(use.node.name not in readers for use in value.uses())


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """Return the least and greatest numbers, 0 among them."""
    return min(0.0, *(float(each.min()) for each in values)), max(
        0.0, *(float(each.max()) for each in values)
    )


def _rounded(values: Array, limits: tuple[float, float]) -> Array:
    """Return numbers rounded to 8 bits within a range that holds 0, as QuantizeLinear does it."""
    scale = (limits[1] - limits[0]) / _STEPS
    if scale == 0:
        return values
    zero = round(-limits[0] / scale)
    steps = np.clip(np.rint(values / scale) + zero, 0, _STEPS) - zero
    return (steps * scale).astype(np.float32)


INPUTS = (8, 64)
"""Inputs that losses are measured on: fewest and most. On a classifier with 54 nodes, losses of single nodes
are off by a factor of 3.1 with 4 inputs, 2.4 with 8 and 2.1 with 12 or 16 (one standard deviation, against
the divergence of 24 others)."""
_EFFORT, _PASSES = 2e12, 3
"""Multiply-accumulates that decide between them, some 40 seconds of one core, and whole passes for a node."""
_METHOD = 4
"""Raised when losses are measured otherwise than before; part of the names of kept ones."""


class GraphLibrary(FitLibrary):
    """Fits of the nodes of a file, whose candidates' losses are scaled to measured ones."""

    def __init__(self, *arguments: Any, losses: NodeLosses | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._losses = losses

    def part(self, name: str) -> FitLibrary:
        """Return a library of one node that fits without measuring losses."""
        part = super().part(name)
        assert isinstance(part, GraphLibrary)
        part._losses = None
        return part

    def fit_all(self, unfitted: Any, finish: Callable[[CandidateSet], None], *, workers: Any = None) -> None:
        """Fit the candidates of several nodes and measure their losses; see `FitLibrary`."""
        super().fit_all(unfitted, lambda site: finish(self._measured(site)), workers=workers)

    def _measured(self, site: CandidateSet) -> CandidateSet:
        """Return the candidates of a node with losses scaled to those that were measured."""
        if self._losses is None or len(site) < 2:
            return site
        factorised, rounded = _representatives(site.candidates[:-1])
        operations: list[tuple[Operation, ...]] = [*((each,) for each in factorised.values())]
        operations += [(each,) for each in rounded]
        # In float32, as constants are: each is as large as the layer.
        weights = [self.weight(site.name, each).float() for each in operations]
        integer = [any(operation.computes_integers for operation in each) for each in operations]
        if site.spec.kind in OPAQUE_KINDS:
            losses = [self._losses.of_lstm(site.name, each.weight_bits) for each in rounded]
        else:
            losses = self._losses.of(self, site.name, weights, integer)
        errors = [self.lost(site.name, weight) for weight in weights]
        errors = [error + ACTIVATION_NOISE**2 * each for error, each in zip(errors, integer, strict=True)]
        scales = [loss / error if error > 0 else 0.0 for loss, error in zip(losses, errors, strict=True)]
        by_format = dict(zip(factorised, scales, strict=False))
        by_rounding = dict(zip(rounded, scales[len(factorised) :], strict=True))
        importance = next((scale for scale in scales if scale > 0), 0.0)
        if importance == 0:  # nothing reaches the outputs
            return replace(site, importance=0.0)
        candidates = []
        for candidate in site.candidates[:-1]:
            loss = self._scaled(site.name, candidate, by_format, by_rounding)
            candidates.append(replace(candidate, error=(loss / importance) ** 0.5))
        return replace(site, candidates=(*candidates, site.candidates[-1]), importance=importance)

    def _scaled(
        self,
        name: str,
        candidate: Candidate,
        by_format: Mapping[str, float],
        by_rounding: Mapping[Quantise, float],
    ) -> float:
        """Return a candidate's loss: that of its factors and that of rounding, each with its own scale."""
        factors = [each for each in candidate.operations if isinstance(each, Factorise)]
        rounding = [each for each in candidate.operations if isinstance(each, Quantise)]
        squared = candidate.error**2
        by_factors = sum(self.fit(name, each).error ** 2 for each in factors) if rounding else squared
        loss = sum(by_format[each.format] * by_factors for each in factors)
        if rounding:
            loss += by_rounding[rounding[0]] * max(0.0, squared - (by_factors if factors else 0.0))
        return loss


def _representatives(candidates: Sequence[Candidate]) -> tuple[dict[str, Factorise], list[Quantise]]:
    """Return one factorisation of each format, that of median error, and the distinct roundings."""
    by_format: dict[str, dict[Factorise, float]] = {}
    rounded: dict[Quantise, None] = {}
    for candidate in candidates:
        for operation in candidate.operations:
            if isinstance(operation, Factorise):
                errors = by_format.setdefault(operation.format, {})
                errors[operation] = min(candidate.error, errors.get(operation, np.inf))
            elif isinstance(operation, Quantise):
                rounded[operation] = None
    middle = {}
    for name, errors in by_format.items():
        ordered = sorted(errors, key=errors.__getitem__)
        middle[name] = ordered[len(ordered) // 2]
    return middle, list(rounded)


@dataclass(frozen=True, eq=False)
class NodeLosses:
    """Measures the loss at the outputs of a network when one node alone has another weight."""

    network: OnnxNetwork
    nodes: Sequence[Site]
    batches: Sequence[Feed]
    folder: Path | None = None

    def of(
        self, library: FitLibrary, name: str, weights: Sequence[torch.Tensor], integer: Sequence[bool]
    ) -> list[float]:
        """Return the loss (`OutputScore.loss`), averaged over the outputs, for each weight of a node."""
        key = None if self.folder is None else digest(self._key, name, weights, integer)

        def measured() -> list[float]:
            node = next(node for node in self.nodes if node.name == name)
            readers = {each.name for site in self.nodes if not site.hidden for each in site.nodes}
            tail = NodeTail(self.network, node, self._feeds, readers, self._scores)
            return tail.losses(library, weights, integer)

        losses: list[float] = Cache(self.folder).value("losses", str(key), measured)
        return losses

    def of_lstm(self, name: str, bits: int) -> float:
        """Return the loss of an LSTM in integers, with onnxruntime's own kernel."""
        key = None if self.folder is None else digest(self._key, name, bits)

        def measured() -> float:
            node = next(node for node in self.nodes if node.name == name)
            model, source = self.network.graph_model(), self.network.source
            quantise_lstms(model, [(node, bits)])
            after = NumberedAnswers(GraphSession(model, source), self._feeds, self.network.axes)
            numbers = range(len(self._feeds))
            answers = ((self._original.run(number), after.run(number)) for number in numbers)
            return mean_loss(list(self._scores.values()), answers)

        loss: float = Cache(self.folder).value("losses", str(key), measured)
        return loss

    @cached_property
    def _feeds(self) -> list[Feed]:
        macs = sum(node.spec.macs for node in self.nodes)
        fewest, most = INPUTS
        count = int(min(most, max(fewest, _EFFORT / max(1, _PASSES * macs * len(self.nodes)))))
        some = first_inputs(self.batches, count, self.network.axes)
        size = fitting_inputs(self.network, self.nodes, self.batches[0])
        return [part for feed in some for part in self.network.axes.parts(feed, size)]

    @cached_property
    def _original(self) -> NumberedAnswers:
        session = GraphSession(self.network.model, self.network.source)
        return NumberedAnswers(session, self._feeds, self.network.axes)

    @cached_property
    def _scores(self) -> dict[str, OutputScore]:
        scores = output_scores(self._original, range(len(self._feeds)))
        return {score.name: score for score in scores}

    @cached_property
    def _key(self) -> str:
        return digest(_METHOD, self.network.digest, self.network.axes, self._feeds)
