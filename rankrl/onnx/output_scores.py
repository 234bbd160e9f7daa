"""How near answers are to the original's: one score for each output.

The largest number of an output tells little where it is in the same place for every input, or where an output
is no scores of classes. What is scored is decided once, from the original's answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from scipy.special import log_softmax, logsumexp

Array = np.ndarray[Any, np.dtype[Any]]
OutputKind = Literal["classes", "distribution", "values", "labels"]

SCORES: dict[OutputKind, str] = {
    "classes": "the share of inputs with the original's class",
    "distribution": "1 − divergence of the class probabilities / divergence from their mean",
    "values": "1 − squared error / variance of the original's output",
    "labels": "the share of answers that are the original's",
}
"""What each kind of output is scored by."""

_HARDLY_VARIES = 1e-3
"""Standard deviation / root mean square below which numbers are a constant, as far as can be told."""
_SUM_TOLERANCE = 1e-2
"""How far probabilities of classes are off 1 together: files round them."""
_ZERO_SUM = 0.1
"""Of logits: mean square of the sum of a row / what independent numbers of their size have, at most."""
_SEVERAL_UNITS = 16
"""Numbers of a row that may each have a unit of its own; more are an embedding, or coordinates."""
_LEAST_PROBABILITY = 1e-12
_LEAST_DIVERGENCE = 1e-6
"""Divergence in nats below which probabilities are a constant, as far as float32 can tell."""


@dataclass(frozen=True, eq=False)
class OutputScore:
    """What answers of one output are scored by.

    Attributes:
        name: The output's name.
        kind: Of scores of classes, `classes` where the original's class varies with the inputs,
            `distribution` where it does not; `labels` are integers and text, `values` all other numbers.
        reason: Why it is of this kind, for a reader.
        spread: What a constant answer's errors are, on average over the inputs: the divergence from the mean
            distribution in nats, or the variance of every unit.
        units: Index of the unit of every channel; None where all numbers have one unit.
        axis: The axis of the channels.
        probabilities: Whether scores of classes are probabilities, not logits.
        log_spread: Variance over the inputs of the centred logarithms of class probabilities.
    """

    name: str
    kind: OutputKind
    reason: str
    spread: Array = field(default_factory=lambda: np.ones(1))
    units: Array | None = None
    axis: int = 1
    probabilities: bool = False
    log_spread: float = 1.0

    def __call__(self, before: Array, after: Array) -> Array:
        """Return the score of every input, shape (N,), 1 where the answers are the same.

        Below 0 an answer is worse than the mean of the original's.

        Args:
            before: The original's answers to a batch, inputs on the first axis.
            after: Those of a compressed network, of the same shape.
        """
        if self.kind == "classes":
            same: Array = (before.argmax(1) == after.argmax(1)).astype(np.float64)
            return same
        if self.kind == "labels":
            return _by_input(before == after)
        if self.kind == "distribution":
            known, found = (log_probabilities(each, self.probabilities) for each in (before, after))
            return 1 - (np.exp(known) * (known - found)).sum(1) / self.spread[0]
        lost = np.square(after.astype(np.float64) - before)
        if self.units is None:
            return 1 - _by_input(lost) / self.spread[0]
        lost = np.moveaxis(lost, self.axis, 0)
        shares = [
            _by_input(np.moveaxis(lost[self.units == unit], 0, -1)) / spread
            for unit, spread in enumerate(self.spread)
        ]
        return 1 - np.mean(shares, 0)

    def numbers(self, answers: Array) -> Array:
        """Return what tells how far answers moved, float64.

        Of scores of classes these are the logits, up to what no probability depends on: the logarithms of the
        probabilities less their mean over the classes, (N, classes). Probabilities near 1 hide what moved
        them. Of all others they are the answers.
        """
        if not self._of_classes:
            return answers.astype(np.float64)
        return _centred(log_probabilities(answers, self.probabilities))

    def loss(self, before: Array, after: Array) -> Array:
        """Return what every input loses, shape (N,): a number that few inputs tell, and small errors change.

        Of scores of classes it is the squared error of the logits relative to their variance: the divergence
        of a few inputs is that of the one nearest to another class. Of all others it is 1 − the score.

        Args:
            before: The original's answers to a batch, inputs on the first axis.
            after: Those of a compressed network, of the same shape.
        """
        if not self._of_classes:
            return 1 - self(before, after)
        return _by_input(np.square(self.numbers(after) - self.numbers(before))) / self.log_spread

    @property
    def _of_classes(self) -> bool:
        return self.kind in ("classes", "distribution")


def output_score(name: str, answers: Sequence[Array], classes: bool = False) -> OutputScore:
    """Decide what an output is scored by.

    Numbers of a row are scores of classes where they are probabilities, or where their sum is zero next to
    their size: cross-entropy does not change when all logits grow alike, so that its gradient sums to zero
    over the classes, and weight decay takes what else the sum held. The sum of C independent numbers, those
    of a regression or an embedding, has C times their mean square.

    A divergence is measured against that of the best constant answer, R^2_KL (Cameron & Windmeijer, "An
    R-squared measure of goodness of fit for some common nonlinear regression models", Journal of
    Econometrics 77, 1997); squared errors against the variance, R^2. Both are of samples, so that a constant
    scores about 0.

    Args:
        name: The output's name.
        answers: The original's answers, one array a batch, inputs on the first axis.
        classes: Whether they are known to be scores of classes, by the labels.
    """
    first = answers[0]
    if first.dtype.kind not in "fu" or not first.ndim:
        return OutputScore(name, "labels", "it is integers or text")
    if len({each.shape[1:] for each in answers}) > 1:
        numbers = np.concatenate([each.reshape(-1) for each in answers]).astype(np.float64)
        return OutputScore(
            name, "values", "it has other sizes for other inputs", _spreads(numbers[:, None], [...])
        )
    rows = np.concatenate(answers).astype(np.float64)
    if first.dtype.kind != "f" or rows.ndim != 2 or rows.shape[1] < 2:
        return _of_values(name, rows, "it is no scores of classes, one row for each input")
    if not (classes or _scores_classes(rows)):
        return _of_values(name, rows, "its numbers are neither probabilities nor logits of classes")
    probabilities = _are_probabilities(rows)
    known = log_probabilities(rows, probabilities)
    varies = float(_spreads(_centred(known), [...])[0])
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
    """Return what a network loses (`OutputScore.loss`), averaged over the inputs and then over the outputs.

    Args:
        scores: What its outputs are scored by.
        answers: The original's and its own answers to every batch, one array for each output.
    """
    losses: list[list[Array]] = [[] for _ in scores]
    for before, after in answers:
        for score, rows, known, moved in zip(scores, losses, before, after, strict=True):
            rows.append(score.loss(known, moved))
    return float(np.mean([np.concatenate(rows).mean() for rows in losses]))


def expected_changes(margins: Array, before: Array, after: Array) -> float:
    """Return the share of inputs whose class is expected to change.

    On n inputs the share that did change moves in steps of 1/n: twenty inputs say nothing of a loss of half a
    point. Which answer meets which error is chance, though, so that every error is added to every answer,
    classes in the order of their scores.

    Args:
        margins: Scores of classes that the original gives, (M, classes), logits or logarithms: those of
            inputs that nothing else is known of are welcome.
        before: What it gives of some inputs, (N, classes).
        after: What a compressed network gives of these.
    """
    order = np.argsort(-before, axis=1)
    errors = np.take_along_axis(after - before, order, 1)
    sorted_margins = -np.sort(-margins, axis=1)
    return float(np.mean([((sorted_margins + error).argmax(1) != 0).mean() for error in errors]))


def _scores_classes(rows: Array) -> bool:
    """Tell whether rows are probabilities, their logarithms, or logits of classes."""
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


def _of_values(name: str, rows: Array, reason: str) -> OutputScore:
    """Return the score of numbers, those of one unit together, every unit apart.

    The few numbers of a regression have a unit each. In maps and lists, as a detector's, probabilities
    (between 0 and 1) are told from coordinates.
    """
    axis = _channel_axis(rows)
    if axis is None:
        return OutputScore(name, "values", reason, _spreads(rows, [...]))
    count = rows.shape[axis]
    channels = np.moveaxis(rows, axis, 0).reshape(count, -1)
    shares = (channels.min(1) >= 0) & (channels.max(1) <= 1)
    if rows.ndim == 2 and 1 < count <= _SEVERAL_UNITS:
        units = np.arange(count)
    elif shares.any() and not shares.all():
        units = shares.astype(int)
    else:
        return OutputScore(name, "values", reason, _spreads(rows, [...]))
    units_of = [(slice(None),) * axis + (units == unit,) for unit in range(units.max() + 1)]
    spreads = _spreads(rows, units_of)
    return OutputScore(name, "values", reason, spreads, units, axis)


def _channel_axis(rows: Array) -> int | None:
    """Return the axis whose positions may have units of their own: of three the shorter, else the second."""
    if rows.ndim < 2:
        return None
    return 2 if rows.ndim == 3 and rows.shape[2] < rows.shape[1] else 1


def _spreads(rows: Array, units_of: Sequence[Any]) -> Array:
    """Return the variance over the inputs of each selection, averaged over its numbers.

    Where it hardly varies it is the mean square instead: the error is then relative to its size.
    """
    count = len(rows)
    squares = [float(np.square(rows[each]).mean()) for each in units_of]
    spreads = [
        float(np.square(rows[each] - rows[each].mean(0)).mean()) * count / max(1, count - 1)
        for each in units_of
    ]
    return np.array(
        [
            spread if spread > _HARDLY_VARIES**2 * square else square or 1.0
            for spread, square in zip(spreads, squares, strict=True)
        ]
    )


def _by_input(numbers: Array) -> Array:
    """Return the mean over all but the first axis."""
    means: Array = numbers.reshape(len(numbers), -1).mean(1) if len(numbers) else np.zeros(0)
    return means
