"""Score plans and whole networks by held-out images or by a user's own function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from decomposition import CandidateSet
from decomposition.choose.library import FitLibrary
from decomposition.network.inputs import Inputs, joined, rows
from rankrl.data import ImageData, augmented_copy
from rankrl.data.calibration import calibration_images
from rankrl.options.search import Term
from rankrl.plan_search.scores.evaluation import Evaluator
from rankrl.plan_search.scores.evaluator import (
    EvaluatorOptions,
    PlanEvaluator,
    ScoredImages,
    accuracy_term,
    probes,
    weighed,
)
from rankrl.plan_search.scores.parallel import ParallelEvaluator, ParallelScoreEvaluator
from rankrl.plan_search.scores.score_evaluator import Score, ScoreEvaluator, check_score, scored
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.training import predict_logits
from rankrl.workers.processes import WorkerCluster

log = logging.getLogger(__name__)

_WEIGHING_IMAGES = 250
"""Held-out images that single layers are measured on at most."""
_WEIGHING_MACS = 1e12
"""Multiply-accumulates of one pass for each layer, which are minutes of one core; larger networks get fewer
images."""
_FEWEST_IMAGES = 16


class Scoring(Protocol):
    """Scores plans, and whole networks."""

    def check(self) -> None:
        """Refuse a dense network that cannot be scored, before anything takes time."""

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Correct the sites' importances by measurements, if that is possible."""

    def evaluator(
        self, library: FitLibrary, problem: SearchProblem, *, cluster: WorkerCluster | None
    ) -> AbstractContextManager[Evaluator]:
        """Return the evaluator of a search's plans, in this process or in the workers of a cluster."""

    def of_networks(self) -> Callable[[Any], float]:
        """Return the function that scores compressed and refitted networks."""

    def of_original(self) -> float:
        """Return the score of the original network, as `of_networks` scores."""

    def losses(self) -> Callable[[Any], float]:
        """Return the function from such a network to its loss against the original, in the score's unit."""


@dataclass(frozen=True)
class ImageScoring:
    """Scores by images held out of the training set; test images choose nothing."""

    model: nn.Module
    data: ImageData
    options: EvaluatorOptions
    images: int

    def check(self) -> None:
        """Do nothing: the network was checked to be a classifier when it was built."""

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Correct each site's losses by one measured divergence.

        Each layer is compressed alone to its cheapest candidate, and all later layers are refitted, as in the
        final network: without the refit, layers whose errors can be compensated count too much. Where
        channels or blocks may go, which cannot be refitted quickly, the sites stay as they are.
        """
        sites = problem.sites
        if any(site.narrows or site.removal is not None for site in sites):
            return sites
        few = max(_FEWEST_IMAGES, int(_WEIGHING_MACS / (len(sites) * problem.macs)))
        refit = min(self.options.refit_images, few)
        options = replace(self.options, statistics="refitted", refit_images=refit)
        scoring = replace(self, options=options, images=min(self.images, few, _WEIGHING_IMAGES))
        only = probes(problem)
        log.info("measuring what one candidate of each of %d layers costs the outputs", len(sites))
        evaluator = scoring.plan_evaluator(library, problem)
        divergences = evaluator.divergences(evaluator.batches, only)
        return weighed(sites, only, [float(each[j]) for each, j in zip(divergences, only, strict=True)])

    def evaluator(
        self, library: FitLibrary, problem: SearchProblem, *, cluster: WorkerCluster | None
    ) -> AbstractContextManager[Evaluator]:
        """Return the evaluator of a search's plans, in this process or in the workers of a cluster."""
        if cluster is None:
            return nullcontext(self.plan_evaluator(library, problem))
        images = self._scored_images()
        return ParallelEvaluator(self.model, library, problem, images, cluster=cluster, options=self.options)

    def plan_evaluator(self, library: FitLibrary, problem: SearchProblem) -> PlanEvaluator:
        """Return the evaluator in this process."""
        return PlanEvaluator(self.model, library, problem, self._scored_images(), options=self.options)

    def _scored_images(self) -> ScoredImages:
        data, options, calibration = self.data, self.options, None
        if options.statistics == "refitted":  # a subset of the inputs that layers are fitted on
            calibration = calibration_images(data, options.refit_images, seed=options.seed)
        images = data.heldout.first(self.images)
        return ScoredImages(images, data.mean, data.std, data.augmentation, calibration)

    def of_networks(self) -> Callable[[nn.Module], float]:
        """Return the function that gives the search's accuracy term on all held-out images.

        A search uses part of them, for speed; comparing nearly equal networks needs all.
        """
        return self._of_networks(self.options.term)

    def of_original(self) -> float:
        """Return the dense network's score on all held-out images."""
        return self.of_networks()(self.model)

    def losses(self) -> Callable[[nn.Module], float]:
        """Return the function from a compressed network to its loss of accuracy on all held-out images."""
        accuracy = self._of_networks("accuracy")
        dense = accuracy(self.model)
        return lambda network: dense - accuracy(network)

    def _of_networks(self, term: Term) -> Callable[[nn.Module], float]:
        data, images = self.data, self.data.heldout
        if self.options.augmented:
            images = augmented_copy(images, data.augmentation, self.options.seed)
        known = predict_logits(self.model, images, mean=data.mean, std=data.std)

        def score(network: nn.Module) -> float:
            logits = predict_logits(network, images, mean=data.mean, std=data.std)
            return accuracy_term(term, logits, images.y.to(logits.device), known)

        return score


@dataclass(frozen=True)
class FunctionScoring:
    """Scores by a user's own function."""

    model: nn.Module
    score: Score
    inputs: Sequence[Inputs]

    def check(self) -> None:
        """Call the function on the dense network."""
        check_score(self.score, self.model)

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Return the sites as they are: a call of the function may take long."""
        return problem.sites

    def evaluator(
        self, library: FitLibrary, problem: SearchProblem, *, cluster: WorkerCluster | None
    ) -> AbstractContextManager[Evaluator]:
        """Return the evaluator of a search's plans, in this process or in the workers of a cluster."""
        example = joined([rows(batch, slice(2)) for batch in self.inputs[:4]])
        if cluster is None:
            return nullcontext(ScoreEvaluator(self.model, library, problem, self.score, example))
        return ParallelScoreEvaluator(self.model, library, problem, self.score, example, cluster=cluster)

    def of_networks(self) -> Callable[[nn.Module], float]:
        """Return the user's function with its results checked."""
        return lambda network: scored(self.score, network, "a finalist")

    def of_original(self) -> float:
        """Return the dense network's score."""
        return scored(self.score, self.model, "the dense network")

    def losses(self) -> Callable[[nn.Module], float]:
        """Return the function from a compressed network to its loss of score against the dense one."""
        dense = self.of_original()
        return lambda network: dense - scored(self.score, network, "a compressed network")
