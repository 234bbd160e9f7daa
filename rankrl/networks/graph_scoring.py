"""Score plans of a network in an ONNX file on one graph whose constants are exchanged for each plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import onnxruntime
import torch

from decomposition import CandidateSet, FitLibrary
from decomposition.cache import digest
from rankrl.errors import ConfigError
from rankrl.onnx.graph.batch_axes import BatchAxes
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork, open_session
from rankrl.onnx.graph.rewrite import OpenConstants, open_constants
from rankrl.onnx.graph.sites import Site
from rankrl.onnx.graph_edits import Array, without_unused
from rankrl.onnx.output_scores import OutputScore, expected_changes, log_probabilities, mean_loss
from rankrl.onnx.protobuf import to_proto
from rankrl.plan_search.scores.evaluation import Evaluator, RememberingEvaluator
from rankrl.plan_search.scores.evaluators import checked_score, each_alone, score_identity
from rankrl.plan_search.scores.scoring_network import CACHE_BYTES
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.verify.agreement import (
    OutputAgreement,
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
        answers = _Remembered.of(self._answers(session, self.feeds))
        losses = []
        for index, output in enumerate(agreement(self._original, answers, self._numbers, self.output_scores)):
            losses.append(1 - output.score)
            if output.kind == "classes":
                probabilities = self.output_scores[index].probabilities
                known, before, after = (
                    log_probabilities(each.rows(index), probabilities)
                    for each in (self._known, self._original, answers)
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
        """Compare the outputs of an open network with those of the original."""
        answers = self._answers(session, self.feeds)
        return agreement(self._original, answers, self._numbers, self.output_scores)

    def loss(self, session: onnxruntime.InferenceSession) -> float:
        """Return the loss of an open network (`mean_loss`)."""
        answers = self._answers(session, self.feeds)
        pairs = ((self._original.run(number), answers.run(number)) for number in self._numbers)
        return mean_loss(self.output_scores, pairs)

    def constant_agreement(self) -> list[OutputAgreement]:
        """Compare the best constant answer with the original's outputs."""
        return constant_agreement(self._original, self._numbers)

    @cached_property
    def output_scores(self) -> list[OutputScore]:
        return output_scores(self._original, self._numbers)

    @property
    def fingerprint(self) -> str:
        """Hash of everything besides the plan on which scores depend."""
        scored_by = (self.metric, self.feeds) if self.score is None else score_identity(self.score)
        return digest(self.network.digest, scored_by)[:16]

    @property
    def _numbers(self) -> range:
        return range(len(self.feeds))

    @cached_property
    def _original(self) -> _Remembered:
        return self._answers_of_original(self.feeds)

    @cached_property
    def _known(self) -> _Remembered:
        """The original's answers to all inputs."""
        others = self._answers_of_original(self.others)
        return replace(self._original, answers=[*self._original.answers, *others.answers])

    def _answers_of_original(self, feeds: Sequence[Feed]) -> _Remembered:
        session = open_session(self.network.model, self.network.source)
        return _Remembered.of(self._answers(session, feeds))

    def _answers(self, session: onnxruntime.InferenceSession, feeds: Sequence[Feed]) -> NumberedAnswers:
        opened = GraphSession(session, self.network.source, tensors=True)
        return NumberedAnswers(opened, feeds, self.network.axes)


class OnnxPlanEvaluator(RememberingEvaluator):
    """Scores the plans of a search; equal plans are scored once."""

    def __init__(self, scoring: OnnxScoring, library: FitLibrary, problem: SearchProblem) -> None:
        super().__init__(problem)
        self.scoring = scoring
        self.graph = ScoringGraph(scoring.network, scoring.nodes, library, problem.sites)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything besides the plan on which scores depend; see `Evaluator`."""
        return self.scoring.fingerprint

    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""
        what = f"the plan with candidates {list(choices)}"
        return self.scoring.of_session(self.graph.session(choices), what)

    def divergences(self, batches: int) -> list[np.ndarray]:
        scoring = replace(self.scoring, feeds=self.scoring.single[:batches])

        def divergence(plan: Choices) -> float:
            return scoring.loss(self.graph.session(plan))

        return each_alone(self.graph.sites, divergence)


@dataclass(frozen=True)
class NumberedAnswers:
    """A network that answers batches by their number, inputs counted on the first axis of each answer."""

    session: GraphSession
    feeds: Sequence[Feed]
    axes: BatchAxes

    @property
    def output_names(self) -> list[str]:
        return self.session.output_names

    def run(self, number: int, /) -> list[Array]:
        answers = zip(self.output_names, self.session.run(self.feeds[number]), strict=True)
        return [self.axes.first_axis(name, each) for name, each in answers]


@dataclass(frozen=True)
class _Remembered:
    """Answers to batches by their number."""

    output_names: list[str]
    answers: list[list[Array]]

    @classmethod
    def of(cls, answers: NumberedAnswers) -> _Remembered:
        return cls(answers.output_names, [answers.run(number) for number in range(len(answers.feeds))])

    def rows(self, index: int) -> Array:
        """Return the answers of one output to all batches, inputs on the first axis."""
        return np.concatenate([each[index] for each in self.answers])

    def run(self, number: int, /) -> list[Array]:
        return self.answers[number]


def _size(values: _Values) -> int:
    return sum(map(len, values.values()))
