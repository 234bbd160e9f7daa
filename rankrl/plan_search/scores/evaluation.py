"""Evaluations of plans, and the contract of evaluators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rankrl.plan_search.space.problem import Choices


@dataclass(frozen=True)
class Evaluation:
    """The numbers of one scored plan.

    Attributes:
        score: The accuracy term that the reward uses, 0 to 1 (see `ScoringOptions.term`).
        accuracy: Fraction of the scored held-out images that are classified correctly.
        params: Parameters of the whole compressed network.
        macs: Multiply-accumulates of the whole compressed network for one input.
        params_kept: `params` / those of the dense network.
        macs_kept: `macs` / those of the dense network.
        seconds: Wall time of the scoring; 0 for a plan that had been scored before.
        cached: Whether an equal plan had been scored before.
    """

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
        """Measure how far the network's answers move when one site alone is compressed.

        Args:
            batches: Number of its batches to measure on; all where there are fewer.
            only: The candidate of every site that is measured alone; None for all candidates.

        Returns:
            For every site the divergence under each of its candidates; shape (candidates,), 0 for the dense
            one and for those that are not measured.
        """
