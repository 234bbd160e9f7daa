"""Score the outputs of a compressed network against the original's: divergence or R^2, one per output.

The largest number of an output tells little where it is in the same place for every input, or where the
output holds no class scores. The kind of each score is decided once, from the original's answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from scipy.special import log_softmax, logsumexp

from decomposition.calibration.units import (
    SEVERAL_UNITS,
    Answers,
    Array,
    Units,
    find_units,
    in_parts,
    known_answers,
)

OutputKind = Literal["classes", "distribution", "values", "labels"]

SCORES: dict[OutputKind, str] = {
    "classes": "the share of inputs with the original's class",
    "distribution": "1 − divergence of the class probabilities / divergence from their mean",
    "values": "1 − squared error / variance of the original's output",
    "labels": "the share of answers that are the original's",
}
"""The score of each kind of output."""

_SUM_TOLERANCE = 1e-2
"""How far probabilities of classes are off 1 together: files round them."""
_ZERO_SUM = 0.1
"""Of logits: mean square of the sum of a row / what independent numbers of their size have, at most."""
_LEAST_PROBABILITY = 1e-12  # keeps the logarithm of zero finite
_LEAST_DIVERGENCE = 1e-6
"""Divergence in nats below which probabilities are a constant, as far as float32 can tell."""


@dataclass(frozen=True, eq=False)
class OutputScore:
    """The score of one output's answers, of the kinds in `SCORES`."""

    name: str
    kind: OutputKind
    reason: str
    spread: Array = field(default_factory=lambda: np.ones(1))
    units: Units | None = None
    probabilities: bool = False
    log_spread: float = 1.0

    def __call__(self, before: Array, after: Array) -> Array:
        """Return the score (N,) of every input, 1 where answers are the same, averaged over units."""
        means: Array = self.by_unit(before, after).mean(0)
        return means

    def by_unit(self, before: Array, after: Array) -> Array:
        """Return the score of every input in each quantity of the output, shape (quantities, N)."""
        if self.kind == "classes":
            same: Array = (before.argmax(1) == after.argmax(1)).astype(np.float64)
            return same[None]
        if self.kind == "labels":
            return _by_input(before == after)[None]
        if self.kind == "distribution":
            known, found = (log_probabilities(each, self.probabilities) for each in (before, after))
            return (1 - (np.exp(known) * (known - found)).sum(1) / self.spread[0])[None]
        axis = 1 if self.units is None else self.units.axis
        lost = [
            self._by_channel(*pair, axis) for pair in zip(in_parts([before]), in_parts([after]), strict=True)
        ]
        shares = np.concatenate(lost) if lost else np.zeros((0, len(self.spread)))
        if self.units is None:
            return 1 - shares.mean(1)[None]
        return 1 - np.stack([shares[:, group].mean(1) for group in self.units.groups])

    def _by_channel(self, before: Array, after: Array, axis: int) -> Array:
        """Return squared errors / spread, (N, channels), or (N, 1) where all have one."""
        after -= before
        lost = np.square(after, out=after)
        if len(self.spread) == 1:
            return _by_input(lost)[:, None] / self.spread
        return _by_input(np.moveaxis(lost, axis, 1), 2) / self.spread

    def numbers(self, answers: Array) -> Array:
        """Return the numbers by which changes are measured: logits less their mean, or the answers."""
        if not self._of_classes:
            return answers.astype(np.float64)
        return _centred(log_probabilities(answers, self.probabilities))

    def loss(self, before: Array, after: Array) -> Array:
        """Return the loss (N,): squared errors of logits relative to their variance, or 1 − the score."""
        if not self._of_classes:
            return 1 - self(before, after)
        # The divergence of a few inputs is that of the one nearest to another class.
        return _by_input(np.square(self.numbers(after) - self.numbers(before))) / self.log_spread

    @property
    def _of_classes(self) -> bool:
        return self.kind in ("classes", "distribution")


def output_score(name: str, answers: Sequence[Array], classes: bool = False) -> OutputScore:
    """Choose the score of an output from the original's answers.

    Numbers of a row are scores of classes where they are probabilities, or where their sum is zero next to
    their size: cross-entropy does not change when all logits grow alike, so that its gradient sums to zero
    over the classes, and weight decay takes what else the sum held. The sum of C independent numbers, those
    of a regression or an embedding, has C times their mean square.

    A divergence is measured against that of the best constant answer, R^2_KL (Cameron & Windmeijer, "An
    R-squared measure of goodness of fit for some common nonlinear regression models", Journal of
    Econometrics 77, 1997); squared errors against the variance, R^2. Both are of samples, so that a constant
    scores about 0.
    """
    first = answers[0]
    if first.dtype.kind not in "fu" or not first.ndim:
        return OutputScore(name, "labels", "it is integers or text")
    if len({each.shape[1:] for each in answers}) > 1:
        spread = known_answers(answers).spread()
        return OutputScore(name, "values", "it has other sizes for other inputs", np.array([spread]))
    if first.dtype.kind != "f" or first.ndim != 2 or first.shape[1] < 2:
        return _of_values(name, answers, "it is no scores of classes, one row for each input")
    rows = np.concatenate(answers).astype(np.float64)
    if not (classes or _scores_classes(rows)):
        return _of_values(name, answers, "its numbers are neither probabilities nor logits of classes")
    probabilities = _are_probabilities(rows)
    known = log_probabilities(rows, probabilities)
    varies = Answers.of([_centred(known)]).spread()
    scores = partial(OutputScore, name, probabilities=probabilities, log_spread=varies)
    if len(np.unique(rows.argmax(1))) > 1:
        return scores("classes", "its class varies with the inputs")
    mean = np.log(np.exp(known).mean(0))
    divergence = float((np.exp(known) * (known - mean)).sum(1).mean()) * len(rows) / max(1, len(rows) - 1)
    spread = divergence if divergence > _LEAST_DIVERGENCE else math.log(rows.shape[1])
    reason = "all inputs have one class there"
    return scores("distribution", reason, np.array([spread]))


def mean_loss(
    scores: Sequence[OutputScore], answers: Iterable[tuple[Sequence[Array], Sequence[Array]]]
) -> float:
    """Return a network's loss (`OutputScore.loss`), averaged over the inputs and then over the outputs."""
    losses: list[list[Array]] = [[] for _ in scores]
    for before, after in answers:
        for score, rows, known, moved in zip(scores, losses, before, after, strict=True):
            rows.append(score.loss(known, moved))
    return float(np.mean([np.concatenate(rows).mean() for rows in losses]))


def expected_changes(margins: Array, before: Array, after: Array) -> float:
    """Return the share of inputs whose class is expected to change.

    Few inputs say nothing of a small share, so every error is added to every answer, classes in the order of
    their scores. Shapes: margins (M, classes), before (N, classes).
    """
    order = np.argsort(-before, axis=1)
    errors = np.take_along_axis(after - before, order, 1)
    sorted_margins = -np.sort(-margins, axis=1)
    return float(np.mean([((sorted_margins + error).argmax(1) != 0).mean() for error in errors]))


def _scores_classes(rows: Array) -> bool:
    if _are_probabilities(rows) or np.abs(logsumexp(rows, axis=1)).max() < _SUM_TOLERANCE:
        return True
    size = np.square(rows).sum(1).mean()
    return bool(size > 0 and np.square(rows.sum(1)).mean() <= _ZERO_SUM * size)


def _are_probabilities(rows: Array) -> bool:
    return bool((rows >= 0).all() and np.abs(rows.sum(1) - 1).max() < _SUM_TOLERANCE)


def log_probabilities(rows: Array, probabilities: bool) -> Array:
    """Return logarithms of class probabilities, shape (N, classes), of probabilities or logits."""
    rows = rows.astype(np.float64)
    if probabilities:
        rows = np.log(np.maximum(rows, _LEAST_PROBABILITY))
    found: Array = log_softmax(rows, axis=1)
    return found


def _centred(logarithms: Array) -> Array:
    """Return logarithms (N, classes) less their mean over the classes."""
    centred: Array = logarithms - logarithms.mean(1, keepdims=True)
    return centred


def _of_values(name: str, answers: Sequence[Array], reason: str) -> OutputScore:
    """Return the score of an output without classes, with one unit, or one a number where these are few."""
    known = Answers.of(answers)
    units = find_units(known)
    if units is not None:
        reason = f"{reason}, and of several quantities the worst counts"
    if 1 < known.mean.size <= SEVERAL_UNITS and known.mean.ndim == 1:
        spreads = [known.spread(channel) for channel in range(known.mean.size)]
        return OutputScore(name, "values", reason, np.array(spreads), units)
    if units is None:
        return OutputScore(name, "values", reason, np.array([known.spread()]))
    return OutputScore(name, "values", reason, units.of_channels(units.spreads), units)


def _by_input(numbers: Array, axes: int = 1) -> Array:
    """Return the mean over all but the first axes."""
    if not numbers.size:
        return np.zeros(numbers.shape[:axes])
    means: Array = numbers.reshape(*numbers.shape[:axes], -1).mean(-1)
    return means
