"""Score plans in worker processes, with the same results as in one process.

The main process keeps the order and the known evaluations; workers only compute class scores or call the
user's function. So the same seed gives the same plans whatever the number of workers. Each worker runs torch
on `search.worker_cpus` threads, one by default. A search in one process on several threads gives the same
plans as far as torch gives equal class scores on one thread and on several: it did, bit for bit in bfloat16
and float32, for ResNet-20 on an x86 CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from decomposition.calibration.moments import InputMoments
from decomposition.choose.library import FitLibrary
from decomposition.fit.fitting import Fit
from decomposition.network.inputs import Inputs
from decomposition.network.surgery import copied
from decomposition.operations import Factorise
from rankrl.device import Precision, select_device
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.scores.evaluator import EvaluatorOptions, PlanEvaluator, ScoredImages, batch_size
from rankrl.plan_search.scores.score_evaluator import Score, ScoreEvaluator
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.workers.processes import WorkerCluster, WorkerPool, Workers


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
        """Return a fit of the library."""
        return self.cache.fits[name, operation]


@dataclass(frozen=True)
class _Task:
    """Batches `start` to `stop` (excluded) of one plan."""

    choices: Choices
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class _PlanScorer:
    """Builds the function that computes class scores in a worker."""

    model: nn.Module
    library: FixedFits
    problem: SearchProblem
    data: ScoredImages
    options: EvaluatorOptions
    precision: Precision
    workers: Workers

    def __call__(self) -> Any:
        precision = self.precision
        if self.workers.cluster != "local":  # the worker's devices may differ from the main process's
            device = select_device() if self.workers.gpus > 0 else torch.device("cpu")
            precision = replace(precision, device=device)
        evaluator = PlanEvaluator(
            self.model, self.library, self.problem, self.data, options=self.options, precision=precision
        )

        def score(task: _Task) -> tuple[np.ndarray, float]:
            begin = time.perf_counter()
            logits = evaluator.forward(task.choices, task.start, task.stop).cpu().numpy()
            return logits, time.perf_counter() - begin

        return score


@dataclass(frozen=True)
class _FunctionScorer:
    """Builds the function that calls the user's score in a worker."""

    model: nn.Module
    library: FixedFits
    problem: SearchProblem
    score: Score
    example: Inputs

    def __call__(self) -> Any:
        evaluator = ScoreEvaluator(self.model, self.library, self.problem, self.score, self.example)

        def score(task: _Task) -> tuple[float, float]:
            begin = time.perf_counter()
            return evaluator.value(task.choices), time.perf_counter() - begin

        return score


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
        """Score plans, in order."""
        fresh = list(dict.fromkeys(plan for plan in plans if self._local.known(plan) is None))
        values = self._values(fresh) if fresh else {}
        return [self._local.known(plan) or self._local.record(plan, *values[plan]) for plan in plans]

    @abstractmethod
    def _values(self, plans: Sequence[Choices]) -> Mapping[Choices, tuple[Any, float]]:
        """Compute the values of distinct plans in the workers; return them and their seconds, by plan."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Replace the known evaluations; their plans are not scored again."""
        self._local.restore(known)

    def close(self) -> None:
        """End the worker processes."""
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
        scorer = _PlanScorer(
            copied(model).cpu(),
            FixedFits(library, problem),
            replace(problem, library=None),
            data,
            # Tasks are ranges of batches, so workers use this process's batch size on any device.
            replace(options, batch_size=self._local.batch_size),
            self._local.precision,
            cluster.workers,
        )
        self._pool = cluster.pool(scorer)

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
    """Scores plans like `ScoreEvaluator`, by the user's own function, in worker processes.

    The function and the network must be importable by name (no lambda, no local class), and a script that
    starts workers must do so under `if __name__ == "__main__":`, as always with Python's processes.
    """

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
        scorer = _FunctionScorer(
            model, FixedFits(library, problem), replace(problem, library=None), score, example
        )
        self._pool = cluster.pool(scorer)

    def _values(self, plans: Sequence[Choices]) -> dict[Choices, tuple[float, float]]:
        return dict(zip(plans, self._pool.map([_Task(plan) for plan in plans]), strict=True))
