"""Score plans of a network in an ONNX file, and measure the losses of single nodes.

Plans are scored on one graph whose constants are exchanged; a node's loss is that at the outputs when it
alone gets another weight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from decomposition import CandidateSet, Factorise, FitLibrary, Quantise
from decomposition.cache import Cache, digest
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import OPAQUE_KINDS
from decomposition.operations import ACTIVATION_NOISE, Operation
from rankrl.errors import ConfigError
from rankrl.onnx.graph.calibration import Captured, behind, first_inputs, fitting_inputs
from rankrl.onnx.graph.compressed import quantise_lstms
from rankrl.onnx.graph.network import BatchAxes, Feed, GraphSession, OnnxNetwork, open_session
from rankrl.onnx.graph.rewrite import OpenConstants, open_constants
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import Array, is_standard, names_in, new_name, set_types, without_unused
from rankrl.onnx.output_scores import OutputScore, expected_changes, log_probabilities, mean_loss
from rankrl.onnx.protobuf import to_proto
from rankrl.plan_search.scores.evaluation import Evaluator, RememberingEvaluator
from rankrl.plan_search.scores.evaluators import checked_score, each_alone, score_identity
from rankrl.plan_search.scores.scoring_network import CACHE_BYTES
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.verify.agreement import (
    OutputAgreement,
    Outputs,
    agreement,
    agreement_score,
    constant_agreement,
    output_scores,
)
from rankrl.workers.processes import WorkerCluster

FileMetric = Literal["agreement", "soft_agreement"]
"""Metrics that score plans without a user's score: see `OnnxScoring.metric`."""
SessionScore = Callable[[onnxruntime.InferenceSession], Any]
"""A user's score: from an onnxruntime session to a number, higher is better, or to one for each input."""

_Values = dict[str, bytes]
"""Values of constants, float32, by their names."""


class ScoringGraph:
    """A graph with dense nodes that is opened with the weights of any plan.

    It is rewritten once; for a plan, constants that differ are exchanged and a session is opened
    (`SessionOptions.add_initializer` leaves convolutions with those of the model, seen in 1.31). The shift of
    a node's mean output is corrected where a parameter behind it takes it up.
    """

    def __init__(
        self, network: OnnxNetwork, nodes: Sequence[Site], library: FitLibrary, sites: Sequence[CandidateSet]
    ) -> None:
        self.source, self.library, self.sites = network.source, library, tuple(sites)
        model = network.graph_model()
        self._nodes = {site.name: site for site in nodes}
        self._open = {site.name: open_constants(model, self._nodes[site.name]) for site in self.sites}
        self._model = network.aside.put_back(to_proto(without_unused(model)), tensors=True)
        self._constants = {each.name: each for each in self._model.graph.initializer}
        self._known: OrderedDict[tuple[int, int], _Values] = OrderedDict()
        self._bytes = 0
        self._written = [site.dense for site in self.sites]

    def session(self, choices: Sequence[int]) -> onnxruntime.InferenceSession:
        for index, choice in enumerate(choices):
            if self._written[index] != choice:
                for name, content in self._values(index, int(choice)).items():
                    self._constants[name].raw_data = content
                self._written[index] = int(choice)
        return open_session(self._model, self.source)

    def _values(self, index: int, choice: int) -> _Values:
        key = (index, choice)
        if key not in self._known:
            self._known[key] = self._reconstructed(index, choice)
            self._bytes += _size(self._known[key])
            while self._bytes > CACHE_BYTES and len(self._known) > 1:
                self._bytes -= _size(self._known.popitem(last=False)[1])
        self._known.move_to_end(key)
        return self._known[key]

    def _reconstructed(self, index: int, choice: int) -> _Values:
        site = self.sites[index]
        node, opened = self._nodes[site.name], self._open[site.name]
        weight = self.library.weight(site.name, site.candidates[choice].operations)
        arrays = constants_of(self.library, node, opened, weight)
        return {name: value.tobytes() for name, value in arrays.items()}


def constants_of(
    library: FitLibrary, node: Site, opened: OpenConstants, weight: torch.Tensor
) -> dict[str, Array]:
    """Return a node's constants, float32 by name, for another weight."""
    written = weight.reshape(node.weight.shape)
    if node.hidden:
        both = zip((opened.weight, opened.state), node.recurrent_weights(written), strict=True)
        return {name: value.numpy().astype(np.float32) for name, value in both}
    if node.spread:
        written = node.spread_weight(written)
    arrays = {opened.weight: (written.T if opened.turned else written).numpy()}
    if opened.mean and library.moments is not None:
        lost = (library.weights[node.name] - weight).flatten(1) @ library.moments[node.name].mean
        arrays[opened.mean] = (opened.known + opened.sign * lost.reshape(opened.known.shape)).numpy()
    return {name: value.astype(np.float32) for name, value in arrays.items()}


@dataclass(frozen=True)
class OnnxScoring:
    """The scoring of plans of a network in an ONNX file: a user's score, or agreement with the original."""

    network: OnnxNetwork
    nodes: Sequence[Site]
    feeds: Sequence[Feed]
    score: SessionScore | None = None
    metric: FileMetric = "soft_agreement"
    single: Sequence[Feed] = ()
    others: Sequence[Feed] = ()

    def __post_init__(self) -> None:
        if self.metric not in get_args(FileMetric):
            raise ConfigError(
                f"search.metric must be one of {', '.join(get_args(FileMetric))} for a network in an ONNX "
                f"file, which comes without labels, got {self.metric!r}"
            )

    @property
    def metric_name(self) -> str:
        return self.metric if self.score is None else "score"

    def check(self) -> None:
        """Score the original, so that a score that fails does so before nodes are fitted."""
        self.of_original()

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Return the sites unchanged: losses of nodes are measured when they are fitted."""
        return problem.sites

    def evaluator(
        self, library: FitLibrary, problem: SearchProblem, *, cluster: WorkerCluster | None = None
    ) -> AbstractContextManager[Evaluator]:
        """Return the evaluator of a search's plans, in this process: workers only fit nodes."""
        del cluster
        return nullcontext(OnnxPlanEvaluator(self, library, problem))

    def of_networks(self) -> Callable[[Any], float]:
        """Return the scoring function of compressed networks as they are written (`WrittenGraph`)."""
        return lambda written: self.of_session(written.session, "the compressed network")

    def of_original(self) -> float:
        """Return the original's score: the user's, or full agreement."""
        if self.score is None:
            return 1.0
        return self.of_session(
            open_session(self.network.whole(tensors=True), self.network.source), "the original network"
        )

    def losses(self) -> Callable[[Any], float]:
        """Return the function that measures the loss of score of a written network.

        Classes that change are counted, or expected (`expected_changes`) where that says more.
        """
        if self.score is None:
            return lambda written: self._lost(written.session)
        original = self.of_original()
        return lambda written: original - self.of_session(written.session, "the compressed network")

    def _lost(self, session: onnxruntime.InferenceSession) -> float:
        answers = list(self._answers(session, self.feeds))
        losses = []
        for index, output in enumerate(agreement(self._original, answers, self.output_scores)):
            losses.append(1 - output.score)
            if output.kind == "classes":
                probabilities = self.output_scores[index].probabilities
                known, before, after = (
                    log_probabilities(np.concatenate([outputs[index] for outputs in batches]), probabilities)
                    for batches in (self._known, self._original.batches, answers)
                )
                losses[-1] = max(losses[-1], expected_changes(known, before, after))
        return checked_score(float(np.mean(losses)), "the compressed network")

    def of_session(self, session: onnxruntime.InferenceSession, what: str) -> float:
        if self.score is not None:
            return checked_score(self.score(session), what)
        outputs = self.agreement(session)
        score = agreement_score(outputs)
        if self.metric == "soft_agreement":
            score = float(np.mean([1 - output.largest_error for output in outputs]))
        return checked_score(score, what)

    def agreement(self, session: onnxruntime.InferenceSession) -> list[OutputAgreement]:
        return agreement(self._original, self._answers(session, self.feeds), self.output_scores)

    def loss(self, session: onnxruntime.InferenceSession) -> float:
        answers = self._answers(session, self.feeds)
        return mean_loss(self.output_scores, zip(self._original.batches, answers, strict=True))

    def constant_agreement(self) -> list[OutputAgreement]:
        return constant_agreement(self._original)

    @cached_property
    def output_scores(self) -> list[OutputScore]:
        return output_scores(self._original)

    @property
    def fingerprint(self) -> str:
        """Hash of everything besides the plan on which scores depend."""
        scored_by = (self.metric, self.feeds) if self.score is None else score_identity(self.score)
        return digest(self.network.digest, scored_by)[:16]

    @cached_property
    def _original(self) -> Outputs:
        return outputs_of(self.network.session(), self.feeds, self.network.axes)

    @cached_property
    def _known(self) -> list[Sequence[Array]]:
        """The original's answers to all inputs."""
        others = outputs_of(self.network.session(), self.others, self.network.axes)
        return [*self._original.batches, *others.batches]

    def _answers(self, session: onnxruntime.InferenceSession, feeds: Sequence[Feed]) -> Iterator[list[Array]]:
        opened = GraphSession(session, self.network.source, tensors=True)
        return outputs_by_batch(opened, feeds, self.network.axes)


class OnnxPlanEvaluator(RememberingEvaluator):
    """Scores the plans of a search; equal plans are scored once."""

    def __init__(self, scoring: OnnxScoring, library: FitLibrary, problem: SearchProblem) -> None:
        super().__init__(problem)
        self.scoring = scoring
        self.graph = ScoringGraph(scoring.network, scoring.nodes, library, problem.sites)

    @cached_property
    def fingerprint(self) -> str:
        return self.scoring.fingerprint

    def value(self, choices: Choices) -> float:
        what = f"the plan with candidates {list(choices)}"
        return self.scoring.of_session(self.graph.session(choices), what)

    def divergences(self, batches: int) -> list[np.ndarray]:
        scoring = replace(self.scoring, feeds=self.scoring.single[:batches])

        def divergence(plan: Choices) -> float:
            return scoring.loss(self.graph.session(plan))

        return each_alone(self.graph.sites, divergence)


def outputs_by_batch(session: GraphSession, feeds: Sequence[Feed], axes: BatchAxes) -> Iterator[list[Array]]:
    """Yield the outputs for each batch, inputs counted on their first axis."""
    for feed in feeds:
        outputs = zip(session.output_names, session.run(feed), strict=True)
        yield [axes.first_axis(name, output) for name, output in outputs]


def outputs_of(session: GraphSession, feeds: Sequence[Feed], axes: BatchAxes) -> Outputs:
    return Outputs(session.output_names, list(outputs_by_batch(session, feeds, axes)))


def _size(values: _Values) -> int:
    return sum(map(len, values.values()))


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
            sessions = self.network.session(), GraphSession(model, source)
            both = (outputs_by_batch(session, self._feeds, self.network.axes) for session in sessions)
            return mean_loss(list(self._scores.values()), zip(*both, strict=True))

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
    def _scores(self) -> dict[str, OutputScore]:
        original = outputs_of(self.network.session(), self._feeds, self.network.axes)
        return {score.name: score for score in output_scores(original)}

    @cached_property
    def _key(self) -> str:
        return digest(_METHOD, self.network.digest, self.network.axes, self._feeds)
