"""Evaluations of plans, and the contract of evaluators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rankrl.plan_search.space.problem import Choices


@dataclass(frozen=True)
class Evaluation:
    """The numbers of one scored plan."""

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
        """Hash of everything but the plan that scores depend on."""

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans in order."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Take over the evaluations of the plans scored so far."""


@runtime_checkable
class MeasuresDivergences(Protocol):
    """A scorer that can look at each site alone."""

    def divergences(self, batches: int, only: Sequence[int] | None = None) -> list[np.ndarray]:
        """Measure how far the network's answers move when one site alone is compressed."""
