"""Predicted losses corrected by those of plans that were carried out.

Losses of single layers are squared relative errors of the outputs; a score loses something else: a share of
them where it explains variance, their root where it counts changes of class (Taylor expansion of either).
Nor does every kind of layer keep what was predicted: a refit gives back more of what factors lose than of
what rounding loses. Both are seen in the plans that are measured on the way to a bounded loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decomposition.candidates.candidates import Candidate, CandidateSet
from rankrl.plan_search.measured_plans import MeasuredPlan
from rankrl.plan_search.space.problem import SearchProblem

_POWERS = (1.0, 0.5)
"""Of the sum of layers' losses: of an explained variance, and of a share of changed classes."""
_PRIOR = 0.2
"""Weight of keeping the kinds' common factor, where a plan's relative error weighs 1."""
_MEANINGFUL = (1e-5, 0.5)
"""Losses that tell: below, chance decides; above, scores saturate."""


@dataclass(frozen=True)
class LossModel:
    """What a plan's network is expected to lose of the score.

    Attributes:
        factors: Of the losses of each kind of candidate (`kind_of`) that was measured.
        common: Of those of all others.
        power: Of their sum.
        error: Root mean square of log(measured / expected) of the plans that the model was made of.
    """

    factors: dict[str, float]
    common: float
    power: float
    error: float

    def corrected(self, problem: SearchProblem) -> SearchProblem:
        """Return the problem with the losses of all candidates multiplied by their kinds' factors."""
        return replace(problem, sites=tuple(map(self._corrected, problem.sites)))

    def _corrected(self, site: CandidateSet) -> CandidateSet:
        candidates = [
            replace(each, error=each.error * self.factors.get(kind_of(each), self.common) ** 0.5)
            for each in site.candidates
        ]
        return replace(site, candidates=tuple(candidates))

    def loss(self, sites: Sequence[CandidateSet], choices: Sequence[int]) -> float:
        """Return what a plan is expected to lose of the score.

        Args:
            sites: The sites of the problem, not corrected.
            choices: The candidate of every site, by index.
        """
        parts = _parts(sites, choices)
        total = sum(self.factors.get(kind, self.common) * part for kind, part in parts.items())
        return float(total**self.power)


def kind_of(candidate: Candidate) -> str:
    """Return what a candidate loses by: its format, and integers."""
    if candidate.only_integers:
        return "int8"
    name = candidate.generator if candidate.operations else "dense"
    return f"{name} int8" if candidate.integer else name


def loss_model(problem: SearchProblem, plans: Iterable[MeasuredPlan]) -> LossModel | None:
    """Return the model that comes closest to measured plans, or None where none of them tells anything.

    Factors come from non-negative least squares on relative errors, drawn towards one factor for all kinds.

    Args:
        problem: The problem, with the losses as they were predicted.
        plans: Measured plans.
    """
    low, high = _MEANINGFUL
    telling = [plan for plan in plans if low < plan.loss < high and plan.expected_loss > 0]
    if not telling:
        return None
    parts = [_parts(problem.sites, plan.key) for plan in telling]
    losses = np.array([plan.loss for plan in telling])
    return min((_fitted(parts, losses, power) for power in _POWERS), key=lambda model: model.error)


def _fitted(parts: Sequence[dict[str, float]], losses: np.ndarray, power: float) -> LossModel:
    from scipy.optimize import nnls  # takes a third of a second

    kinds = sorted(set().union(*parts))
    matrix = np.array([[each.get(kind, 0.0) for kind in kinds] for each in parts])
    targets = losses ** (1 / power)
    common = float(np.exp(np.log(targets / matrix.sum(1)).mean()))
    # What a root is off by weighs as much as what the loss itself is off by.
    rows = power * common * matrix / targets[:, None]
    prior = _PRIOR * np.eye(len(kinds))
    ones = np.repeat([power, _PRIOR], [len(rows), len(kinds)])
    solution, _ = nnls(np.concatenate([rows, prior]), ones)
    factors = common * np.maximum(solution, 1e-2)
    expected = (matrix @ factors) ** power
    error = float(np.sqrt(np.square(np.log(losses / expected)).mean()))
    return LossModel(dict(zip(kinds, factors.tolist(), strict=True)), common, power, error)


def _parts(sites: Sequence[CandidateSet], choices: Sequence[int]) -> dict[str, float]:
    """Return the sums of the losses of each kind of candidate."""
    parts: dict[str, float] = {}
    for site, choice in zip(sites, choices, strict=True):
        loss = float(site.losses[choice])
        if loss > 0:
            kind = kind_of(site.candidates[choice])
            parts[kind] = parts.get(kind, 0.0) + loss
    return parts
