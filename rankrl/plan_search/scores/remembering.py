"""What evaluators that score a plan by one number have in common: equal plans are scored once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankrl.plan_search.scores.evaluator import Evaluation
from rankrl.plan_search.space.problem import Choices, SearchProblem


class RememberingEvaluator(ABC):
    """Scores plans one after the other and remembers the scores.

    Args:
        problem: The search problem.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._known: dict[Choices, Evaluation] = {}

    @abstractmethod
    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans one after the other.

        Raises:
            ConfigError: A score is no number.
            NonFiniteError: It is NaN or an infinity.
        """
        return [self._evaluate(choices) for choices in plans]

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Take over the evaluations of the plans scored so far."""
        self._known = dict(known)

    def known(self, choices: Choices) -> Evaluation | None:
        """Return the evaluation of a plan that was scored before, if it was."""
        found = self._known.get(tuple(choices))
        return None if found is None else replace(found, seconds=0.0, cached=True)

    def record(self, choices: Choices, score: float, seconds: float) -> Evaluation:
        """Return and remember the evaluation of a plan with this score, which took so many seconds."""
        cost = self.problem.cost(choices)
        evaluation = Evaluation(
            score=score,
            accuracy=score,
            params=cost.params,
            macs=cost.macs,
            params_kept=cost.params / self.problem.params,
            macs_kept=cost.macs / self.problem.macs,
            seconds=seconds,
        )
        self._known[tuple(choices)] = evaluation
        return evaluation

    def _evaluate(self, choices: Choices) -> Evaluation:
        known = self.known(choices)
        if known is not None:
            return known
        start = time.perf_counter()
        score = self.value(choices)
        return self.record(choices, score, time.perf_counter() - start)
