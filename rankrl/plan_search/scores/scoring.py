"""Score plans and whole networks, in this process or in workers, with the same results."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import CandidateSet
from decomposition.calibration.moments import InputMoments
from decomposition.choose.library import FitLibrary
from decomposition.fit.fitting import Fit
from decomposition.network.inputs import Inputs, joined, rows
from decomposition.network.surgery import copied
from decomposition.operations import Factorise
from rankrl.data import ImageData, augmented_copy
from rankrl.data.sample import calibration_images
from rankrl.device import Precision, select_device
from rankrl.options.search import ScoreMetric
from rankrl.plan_search.scores.evaluation import Evaluation, Evaluator
from rankrl.plan_search.scores.evaluators import (
    EvaluatorOptions,
    PlanEvaluator,
    Score,
    ScoredImages,
    ScoreEvaluator,
    accuracy_metric,
    batch_size,
    check_score,
    probes,
    scored,
    weighed,
)
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.training import predict_logits
from rankrl.workers.processes import WorkerCluster, WorkerPool, Workers

log = logging.getLogger(__name__)


class FixedFits(FitLibrary):
    """The fits of another library without its large moments, for workers that fit nothing."""

    def __init__(self, library: FitLibrary, problem: SearchProblem) -> None:
        self.lister, self.specs, self.weights = library.lister, library.specs, library.weights
        nothing = torch.zeros(0, 0, dtype=torch.float64)
        self.moments = None
        if library.moments is not None:
            self.moments = {
                name: InputMoments(library.moments[name].mean, nothing, library.moments[name].count)
                for name in library.specs
            }
        self.sensitivities = library.sensitivities
        self.cache = library.cached(problem.sites)

    def fit(self, name: str, operation: Factorise) -> Fit:
        return self.cache.fits[name, operation]


@dataclass(frozen=True)
class _Task:
    """Batches `start` to `stop` (excluded) of one plan."""

    choices: Choices
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class _Scorer:
    """Builds the function that scores plans, or parts of one, in a worker."""

    make: Callable[[], PlanEvaluator | ScoreEvaluator]

    def __call__(self) -> Callable[[_Task], tuple[Any, float]]:
        evaluator = self.make()

        def score(task: _Task) -> tuple[Any, float]:
            begin = time.perf_counter()
            return evaluator.part(task.choices, task.start, task.stop), time.perf_counter() - begin

        return score


def _in_worker(workers: Workers, precision: Precision, *arguments: Any, **options: Any) -> PlanEvaluator:
    if workers.cluster != "local":  # the worker's devices may differ from the main process's
        device = select_device() if workers.gpus > 0 else torch.device("cpu")
        precision = replace(precision, device=device)
    return PlanEvaluator(*arguments, precision=precision, **options)


_Local = TypeVar("_Local", PlanEvaluator, ScoreEvaluator)


class _Parallel(ABC, Generic[_Local]):
    """The common part of both evaluators: the worker pool, and the local evaluator with the results."""

    problem: SearchProblem
    _local: _Local
    _pool: WorkerPool

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """The local evaluator's fingerprint: the number of workers may change during a search."""
        return self._local.fingerprint

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        fresh = list(dict.fromkeys(plan for plan in plans if self._local.known(plan) is None))
        values = self._values(fresh) if fresh else {}
        return [self._local.known(plan) or self._local.record(plan, *values[plan]) for plan in plans]

    @abstractmethod
    def _values(self, plans: Sequence[Choices]) -> Mapping[Choices, tuple[Any, float]]:
        """Compute the values of distinct plans in the workers; return them and their seconds, by plan."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        self._local.restore(known)

    def close(self) -> None:
        self._pool.close()


class ParallelEvaluator(_Parallel[PlanEvaluator]):
    """Scores plans like `PlanEvaluator`, in worker processes.

    The plans of one step (`selector.plans_per_step`) are scored at the same time; where there are fewer of
    them than workers, the batches of a plan are shared out too, unless plans are refitted.
    """

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        problem: SearchProblem,
        data: ScoredImages,
        *,
        cluster: WorkerCluster,
        options: EvaluatorOptions | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.problem = problem
        options = EvaluatorOptions() if options is None else options
        self._on_gpus = cluster.workers.gpus > 0
        if self._on_gpus and options.batch_size is None:
            options = replace(options, batch_size=batch_size("cuda"))
        self._local = PlanEvaluator(model, library, problem, data, options=options, precision=precision)
        make = partial(
            _in_worker,
            cluster.workers,
            self._local.precision,
            copied(model).cpu(),
            FixedFits(library, problem),
            replace(problem, library=None),
            data,
            # Tasks are ranges of batches, so workers use this process's batch size on any device.
            options=replace(options, batch_size=self._local.batch_size),
        )
        self._pool = cluster.pool(_Scorer(make))

    @property
    def fingerprint(self) -> str:
        """The local evaluator's fingerprint, marked if only the workers compute on GPUs."""
        own = self._local.fingerprint
        return f"{own}-cuda" if self._on_gpus and self._local.precision.device.type != "cuda" else own

    def _values(self, plans: Sequence[Choices]) -> dict[Choices, tuple[Tensor, float]]:
        shares = 1
        if self._local.options.statistics == "corrected":
            shares = min(self._local.batches, max(1, self._pool.size // len(plans)))
        bounds = np.linspace(0, self._local.batches, shares + 1).round().astype(int).tolist()
        results = self._pool.map(
            [_Task(plan, begin, end) for plan in plans for begin, end in pairwise(bounds)]
        )
        device = self._local.precision.device
        values = {}
        for j, plan in enumerate(plans):
            parts = results[j * shares : (j + 1) * shares]
            logits = torch.cat([torch.tensor(part) for part, _ in parts]).to(device)
            values[plan] = (logits, sum(seconds for _, seconds in parts))
        return values


class ParallelScoreEvaluator(_Parallel[ScoreEvaluator]):
    """Scores plans like `ScoreEvaluator`, by the user's own importable function, in worker processes."""

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        problem: SearchProblem,
        score: Score,
        example: Inputs,
        *,
        cluster: WorkerCluster,
    ) -> None:
        self.problem = problem
        self._local = ScoreEvaluator(model, library, problem, score, example)
        fits, bare = FixedFits(library, problem), replace(problem, library=None)
        self._pool = cluster.pool(_Scorer(partial(ScoreEvaluator, model, fits, bare, score, example)))

    def _values(self, plans: Sequence[Choices]) -> dict[Choices, tuple[float, float]]:
        return dict(zip(plans, self._pool.map([_Task(plan) for plan in plans]), strict=True))


_WEIGHING_IMAGES = 250
"""Held-out images that single layers are measured on at most."""
_WEIGHING_MACS = 1e12
"""Multiply-accumulates of one pass for each layer, which are minutes of one core; larger networks get fewer
images."""
_FEWEST_IMAGES = 16


class Scoring(Protocol):
    @property
    def metric_name(self) -> str:
        """Name of what plans are scored by: a `ScoreMetric`, or `score` for a user's own function."""

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

    @property
    def metric_name(self) -> str:
        return self.options.metric

    def check(self) -> None:
        """Do nothing: the network was checked to be a classifier when it was built."""

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Correct each site's losses by one divergence: its cheapest candidate alone, later layers refitted.

        Where channels or blocks may go, which cannot be refitted quickly, the sites stay as they are.
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
        """Return the metric on all held-out images, which a comparison of nearly equal networks needs."""
        return self._of_networks(self.options.metric)

    def of_original(self) -> float:
        """Return the dense network's score on all held-out images."""
        return self.of_networks()(self.model)

    def losses(self) -> Callable[[nn.Module], float]:
        """Return the function from a compressed network to its loss of accuracy on all held-out images."""
        accuracy = self._of_networks("accuracy")
        dense = accuracy(self.model)
        return lambda network: dense - accuracy(network)

    def _of_networks(self, metric: ScoreMetric) -> Callable[[nn.Module], float]:
        data, images = self.data, self.data.heldout
        if self.options.augmented:
            images = augmented_copy(images, data.augmentation, self.options.seed)
        known = predict_logits(self.model, images, mean=data.mean, std=data.std)

        def score(network: nn.Module) -> float:
            logits = predict_logits(network, images, mean=data.mean, std=data.std)
            return accuracy_metric(metric, logits, images.y.to(logits.device), known)

        return score


@dataclass(frozen=True)
class FunctionScoring:
    model: nn.Module
    score: Score
    inputs: Sequence[Inputs]
    metric_name: str = "score"

    def check(self) -> None:
        check_score(self.score, self.model)

    def weighed(self, library: FitLibrary, problem: SearchProblem) -> Sequence[CandidateSet]:
        """Return the sites as they are: a call of the function may take long."""
        return problem.sites

    def evaluator(
        self, library: FitLibrary, problem: SearchProblem, *, cluster: WorkerCluster | None
    ) -> AbstractContextManager[Evaluator]:
        example = joined([rows(batch, slice(2)) for batch in self.inputs[:4]])
        if cluster is None:
            return nullcontext(ScoreEvaluator(self.model, library, problem, self.score, example))
        return ParallelScoreEvaluator(self.model, library, problem, self.score, example, cluster=cluster)

    def of_networks(self) -> Callable[[nn.Module], float]:
        return lambda network: scored(self.score, network, "a finalist")

    def of_original(self) -> float:
        return scored(self.score, self.model, "the dense network")

    def losses(self) -> Callable[[nn.Module], float]:
        """Return the function from a compressed network to its loss of score against the dense one."""
        dense = self.of_original()
        return lambda network: dense - scored(self.score, network, "a compressed network")
