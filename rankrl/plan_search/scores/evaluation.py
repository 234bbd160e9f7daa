"""Define evaluations of plans and the interface of evaluators, which score no plan twice."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rankrl.plan_search.space.problem import Choices, SearchProblem


@dataclass(frozen=True)
class Evaluation:
    """Score and costs of one plan."""

    score: float
    accuracy: float
    params: int
    macs: int
    params_kept: float
    macs_kept: float
    seconds: float
    cached: bool = False


class Evaluator(Protocol):
    """Scores the plans of a search, in this process or in many."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that scores depend on, except the plan."""

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans in order."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Replace the known evaluations; their plans are not scored again."""


@runtime_checkable
class MeasuresDivergences(Protocol):
    """An evaluator that can compress each site alone and measure the divergence of the outputs."""

    def divergences(self, batches: int, only: Sequence[int] | None = None) -> list[np.ndarray]:
        """Measure the divergence of the network's outputs when one site alone is compressed."""


class RememberingEvaluator(ABC):
    """Scores plans one after the other and remembers the evaluations."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._known: dict[Choices, Evaluation] = {}

    @abstractmethod
    def value(self, choices: Choices) -> Any:
        """Return the score of the network under a plan, or the outputs from which `scores` computes it."""

    def scores(self, choices: Choices, value: Any) -> tuple[float, float]:
        """Return the score and the accuracy of a plan; a score that is a single number stands for both."""
        del choices
        return value, value

    def __call__(self, choices: Choices) -> Evaluation:
        """Score a plan; see `evaluate` for the errors."""
        known = self.known(choices)
        if known is not None:
            return known
        start = time.perf_counter()
        value = self.value(choices)
        return self.record(choices, value, time.perf_counter() - start)

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans one after the other."""
        return [self(choices) for choices in plans]

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Replace the known evaluations; their plans are not scored again."""
        self._known = dict(known)

    def known(self, choices: Choices) -> Evaluation | None:
        """Return the evaluation of a plan that was scored before, if it was."""
        known = self._known.get(tuple(choices))
        return None if known is None else replace(known, seconds=0.0, cached=True)

    def record(self, choices: Choices, value: Any, seconds: float) -> Evaluation:
        """Return and remember the evaluation of a plan."""
        score, accuracy = self.scores(choices, value)
        cost = self.problem.cost(choices)
        evaluation = Evaluation(
            score=score,
            accuracy=accuracy,
            params=cost.params,
            macs=cost.macs,
            params_kept=cost.params / self.problem.params,
            macs_kept=cost.macs / self.problem.macs,
            seconds=seconds,
        )
        self._known[tuple(choices)] = evaluation
        return evaluation
