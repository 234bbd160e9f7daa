"""What the outputs of a network in a file lose when one node alone is compressed, measured.

An error in a node's output is predicted to cost E[e' G e] at the network's outputs (`FitLibrary`), which
holds for small errors and as far as G is known. Here a few candidates of every node are measured, each by a
pass of what lies behind the node: one factorised candidate of each format, in the middle of its ranks, and
every rounding as what it is, of weights and activations. They scale the predicted losses of all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decomposition import CandidateSet, Factorise, FitLibrary, Quantise
from decomposition.cache import Cache, digest
from decomposition.choose.candidates import Candidate
from decomposition.network.layers import OPAQUE_KINDS
from decomposition.operations import Operation
from decomposition.operations.quantise import ACTIVATION_NOISE
from rankrl.networks.graph_scoring import NumberedAnswers
from rankrl.networks.node_tail import NodeTail
from rankrl.onnx.graph.dynamic_lstm import quantise_lstms
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph.sensitivity import first_inputs, fitting_inputs
from rankrl.onnx.graph.site import Site
from rankrl.onnx.output_scores import OutputScore, mean_loss
from rankrl.verify.agreement import output_scores

INPUTS = (8, 64)
"""Inputs that losses are measured on: fewest and most. On a classifier with 54 nodes, losses of single nodes
are off by a factor of 3.1 with 4 inputs, 2.4 with 8 and 2.1 with 12 or 16 (one standard deviation, against
the divergence of 24 others)."""
_EFFORT, _PASSES = 2e12, 3
"""Multiply-accumulates that decide between them, some 40 seconds of one core, and whole passes for a node."""
_METHOD = 4
"""Raised when losses are measured otherwise than before; part of the names of kept ones."""


class GraphLibrary(FitLibrary):
    """Fits of the nodes of a file, whose candidates have losses that are scaled to measured ones."""

    def __init__(self, *arguments: Any, losses: NodeLosses | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._losses = losses

    def part(self, name: str) -> FitLibrary:
        """Return a library of one node, which only fits."""
        part = super().part(name)
        assert isinstance(part, GraphLibrary)
        part._losses = None
        return part

    def fit_all(self, unfitted: Any, finish: Callable[[CandidateSet], None], *, workers: Any = None) -> None:
        """Fit the candidates of several nodes and measure what they lose; see `FitLibrary`."""
        super().fit_all(unfitted, lambda site: finish(self._measured(site)), workers=workers)

    def _measured(self, site: CandidateSet) -> CandidateSet:
        """Return the candidates of a node with losses scaled to those that were measured."""
        if self._losses is None or len(site) < 2:
            return site
        factorised, rounded = _representatives(site.candidates[:-1])
        operations: list[tuple[Operation, ...]] = [*((each,) for each in factorised.values())]
        operations += [(each,) for each in rounded]
        weights = [self.weight(site.name, each) for each in operations]
        integer = [any(operation.computes_integers for operation in each) for each in operations]
        if site.spec.kind in OPAQUE_KINDS:
            losses = [self._losses.of_lstm(site.name, each.weight_bits) for each in rounded]
        else:
            losses = self._losses.of(self, site.name, weights, integer)
        errors = [self._layer_fits.lost(site.name, weight) for weight in weights]
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
        """Return a candidate's loss: the share of the factors and that of rounding, each by its own scale."""
        factors = [each for each in candidate.operations if isinstance(each, Factorise)]
        rounding = [each for each in candidate.operations if isinstance(each, Quantise)]
        squared = candidate.error**2
        by_factors = sum(self.fit(name, each).error ** 2 for each in factors) if rounding else squared
        loss = sum(by_format[each.format] * by_factors for each in factors)
        if rounding:
            loss += by_rounding[rounding[0]] * max(0.0, squared - (by_factors if factors else 0.0))
        return loss


def _representatives(candidates: Sequence[Candidate]) -> tuple[dict[str, Factorise], list[Quantise]]:
    """Return a factorisation of each format, with a middle error, and the different roundings."""
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
    """Measures what the outputs of a network lose when one node alone has another weight."""

    network: OnnxNetwork
    nodes: Sequence[Site]
    batches: Sequence[Feed]
    folder: Path | None = None

    def of(
        self, library: FitLibrary, name: str, weights: Sequence[torch.Tensor], integer: Sequence[bool]
    ) -> list[float]:
        """What the outputs lose (`OutputScore.loss`), averaged over them, for each weight of a node."""
        key = None if self.folder is None else digest(self._key, name, weights, integer)

        def measured() -> list[float]:
            node = next(node for node in self.nodes if node.name == name)
            readers = {each.name for site in self.nodes if not site.hidden for each in site.nodes}
            tail = NodeTail(self.network, node, self._feeds, readers, self._scores)
            return tail.losses(library, weights, integer)

        losses: list[float] = Cache(self.folder).value("losses", str(key), measured)
        return losses

    def of_lstm(self, name: str, bits: int) -> float:
        """Return the same loss of an LSTM in integers, with onnxruntime's own kernel."""
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
        """What each output is scored by."""
        scores = output_scores(self._original, range(len(self._feeds)))
        return {score.name: score for score in scores}

    @cached_property
    def _key(self) -> str:
        return digest(_METHOD, self.network.digest, self.network.axes, self._feeds)
