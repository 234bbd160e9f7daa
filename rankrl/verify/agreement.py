"""Compare outputs with the original's, certify a loss of score, detect collapsed networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from scipy.special import betaincinv, stdtrit

from decomposition.calibration.units import Array, Units, in_parts
from rankrl.errors import ConfigError, ExportError, counted
from rankrl.onnx.output_scores import OutputKind, OutputScore, output_score
from rankrl.training.accuracy import guessing_noise, near_guessing


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network, by their names, for each of several batches of inputs."""

    names: Sequence[str]
    batches: Sequence[Sequence[Array]]

    def of(self, index: int) -> list[Array]:
        """Return one output for each batch, with at least one axis."""
        return [np.atleast_1d(batch[index]) for batch in self.batches]


@dataclass(frozen=True)
class UnitAgreement:
    """Agreement of one quantity of an output, of several that have different units."""

    channels: str
    score: float
    error: float


@dataclass(frozen=True)
class OutputAgreement:
    """Agreement of one output; `values` (N,) are those of single inputs."""

    name: str
    error: float
    top1: float | None
    kind: OutputKind = "values"
    reason: str = ""
    values: Array = field(default_factory=lambda: np.zeros(1), repr=False, compare=False)
    batches: Array = field(default_factory=lambda: np.zeros(1), repr=False, compare=False)
    units: tuple[UnitAgreement, ...] = ()

    @property
    def score(self) -> float:
        """Agreement, 1 at most; about 0 for the best answer that is the same for every input."""
        return float(self.values.mean())

    @property
    def worst(self) -> UnitAgreement | None:
        """The quantity that agrees least, where there are several."""
        return min(self.units, key=lambda unit: unit.score, default=None)

    @property
    def largest_error(self) -> float:
        return max((unit.error for unit in self.units), default=self.error)


def output_scores(original: Outputs, classes: bool = False) -> list[OutputScore]:
    if not original.batches:
        raise ExportError("there are no inputs to compare the networks on")
    return [output_score(name, original.of(index), classes) for index, name in enumerate(original.names)]


def agreement(
    original: Outputs, compressed: Iterable[Sequence[Array]], scores: Sequence[OutputScore]
) -> list[OutputAgreement]:
    """Compare a compressed network's outputs, batch by batch, with the original's."""
    names = original.names
    lost = [_SquaredError(score.units) for score in scores]
    same: list[list[Array]] = [[] for _ in names]
    values: list[list[Array]] = [[] for _ in names]
    for known, found in zip(original.batches, compressed, strict=True):
        for index, (before, after) in enumerate(zip(known, found, strict=True)):
            if before.shape != after.shape:
                raise ExportError(
                    f"the output {names[index]!r} has the shape {after.shape} in the compressed network, "
                    f"{before.shape} in the original"
                )
            values[index].append(scores[index].by_unit(np.atleast_1d(before), np.atleast_1d(after)))
            if before.dtype.kind not in "fiub":
                continue
            lost[index].add(before, after)
            classes, answered = _classes(before), _classes(after)
            if classes is not None and answered is not None:
                same[index].append(classes == answered)
    return [
        _agreement(name, score, errors, shares, classes)
        for name, score, errors, shares, classes in zip(names, scores, lost, values, same, strict=True)
    ]


class _SquaredError:
    """Sums of squares over an output and over each of its quantities."""

    def __init__(self, units: Units | None) -> None:
        self._units = units
        self._lost, self._whole = np.zeros(1), np.zeros(1)

    def add(self, before: Array, after: Array) -> None:
        for known, found in zip(
            in_parts([np.atleast_1d(before)]), in_parts([np.atleast_1d(after)]), strict=True
        ):
            found -= known
            self._lost = self._lost + self._sums(found)
            self._whole = self._whole + self._sums(known)

    def _sums(self, numbers: Array) -> Array:
        """Return the sums over every channel, or over all where they have one unit."""
        squares = np.square(numbers, out=numbers)
        if self._units is None:
            return np.array([squares.sum()])
        others = tuple(axis for axis in range(squares.ndim) if axis != self._units.axis)
        sums: Array = squares.sum(others)
        return sums

    def relative(self) -> list[float]:
        """Return the relative error over all numbers, and of each quantity."""
        chosen: list[Any] = [slice(None), *(() if self._units is None else self._units.groups)]
        pairs = [(self._lost[each].sum(), self._whole[each].sum()) for each in chosen]
        return [float(np.sqrt(lost / whole if whole > 0 else lost)) for lost, whole in pairs]


def _agreement(
    name: str, score: OutputScore, errors: _SquaredError, values: Sequence[Array], same: Sequence[Array]
) -> OutputAgreement:
    """Return the agreement of an output, from its scores (quantities, N) in every batch."""
    error, *of_units = errors.relative()
    rows = np.concatenate(values, axis=1)
    worst = int(rows.mean(1).argmin())
    names = () if score.units is None else score.units.names
    return OutputAgreement(
        name,
        error,
        float(np.concatenate(same).mean()) if same else None,
        score.kind,
        score.reason,
        rows[worst],
        np.array([each[worst].mean() for each in values]),
        tuple(map(UnitAgreement, names, rows.mean(1).tolist(), of_units)),
    )


def _classes(output: Array) -> Array | None:
    """Return the class of every input, where an output is scores of classes (N, classes)."""
    if output.dtype.kind == "f" and output.ndim == 2 and output.shape[1] > 1:
        classes: Array = output.argmax(1)
        return classes
    return None


def constant_agreement(original: Outputs) -> list[OutputAgreement]:
    """Return the agreement of the best constant answer: means of the outputs, the commonest class."""
    columns = zip(*original.batches, strict=True)
    return [_constant(name, values) for name, values in zip(original.names, columns, strict=True)]


def _constant(name: str, values: Sequence[Array]) -> OutputAgreement:
    if any(each.dtype.kind not in "fiub" or not each.ndim for each in values):
        return OutputAgreement(name, 0.0, None)
    alike = len({each.shape[1:] for each in values}) == 1
    rows = [each if alike else each.reshape(-1) for each in values]
    count = sum(map(len, rows))
    mean = sum(each.sum(0, dtype=np.float64) for each in rows) / max(1, count)
    # n / (n - 1), since the mean was fitted to these inputs
    spread = sum(float(np.square(each - mean).sum()) for each in rows) * count / max(1, count - 1)
    whole = sum(float(np.square(each, dtype=np.float64).sum()) for each in rows)
    classes = [_classes(each) for each in values]
    shares = [each for each in classes if each is not None]
    top1 = float(np.bincount(np.concatenate(shares)).max() / count) if shares else None
    return OutputAgreement(name, math.sqrt(spread / whole) if whole > 0 else 0.0, top1)


def agreement_score(outputs: Sequence[OutputAgreement]) -> float:
    return float(np.mean([each.score for each in outputs]))


def agreement_values(outputs: Sequence[OutputAgreement], inputs: int) -> Array | None:
    """Return the agreement of every input, shape (inputs,)."""
    rows = [next((x for x in (each.values, each.batches) if len(x) == inputs), None) for each in outputs]
    values = [each for each in rows if each is not None]
    if not values or len(values) < len(rows):
        return None
    mean: Array = np.mean(values, 0)
    return mean


_HARDLY_VARIES = 1e-3
"""The relative error of a constant below which an output is one, as far as can be told."""
_REMEDY = (
    "Do not use it as it is: ask for a larger budget, leave sensitive layers as they are (skip), give more "
    "inputs, or fine-tune it"
)


def collapse(
    outputs: Sequence[OutputAgreement], constant: Sequence[OutputAgreement], inputs: int
) -> str | None:
    """Return a message if a compressed network answers no better than a constant, else None.

    Outputs without classes have collapsed where R^2 <= 0, those with classes where they have the original's
    class hardly more often than one answer to all inputs; on few inputs both must hold.
    """
    for output, guess in zip(outputs, constant, strict=True):
        shown, name, worst = _no_better(output, guess, inputs), output.name, output.worst
        if worst is not None:
            name, shown = f"{name}[{worst.channels}]", _lost(worst)
        if shown is not None:
            told = f"on {counted(inputs, 'held-out input')} its output {name!r} has {shown}"
            return f"the compressed network has collapsed: {told}. {_REMEDY}"
    return None


def _lost(unit: UnitAgreement) -> str | None:
    if unit.score > 0:
        return None
    return f"a squared error of {1 - unit.score:.2f} of its variance, more than the original's mean output"


def _no_better(output: OutputAgreement, guess: OutputAgreement, inputs: int) -> str | None:
    useless = output.error >= guess.error
    if guess.error <= _HARDLY_VARIES:
        return None
    if output.top1 is None or guess.top1 is None:
        error = f"a relative error of {output.error:.3f}, the original's mean output one of {guess.error:.3f}"
        return error if useless else None
    if output.top1 == 1 or not near_guessing(output.top1, guess.top1, inputs):
        return None
    classes = (
        f"the original's class {output.top1:.1%} of the time, one answer to all of them {guess.top1:.1%}"
    )
    return classes if _tells(guess.top1, inputs) or useless else None


def _tells(share: float, inputs: int) -> bool:
    """Tell whether the noise of guessing on so many inputs is small next to what guessing misses."""
    return share < 1 and guessing_noise(share, inputs) <= (1 - share) / 4


def accuracy_collapse(accuracy: float, baseline: float, share: float, images: int) -> str | None:
    """Return a message if a network's accuracy has fallen to that of guessing, else None."""
    fallen = near_guessing(accuracy, share, images) if _tells(share, images) else accuracy <= share
    if near_guessing(baseline, share, images) or not fallen:
        return None
    return (
        f"the compressed network has collapsed: it answers {accuracy:.1%} of {counted(images, 'input')} "
        f"right, the original {baseline:.1%}, one answer to all of them {share:.1%}. {_REMEDY}"
    )


CONFIDENCE = 0.95
_Z = 1.959963984540054
"""Quantile of the normal distribution at (1 + CONFIDENCE) / 2."""
_MOST_INPUTS = 2**40  # ends the doubling where no number of inputs certifies the drop
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Basis:
    """Kind and inputs of the scores behind a certificate."""

    unit: str
    what: str
    independent: bool = True


_ANY = Basis("score", "inputs")
OWN_SCORE = Basis("score", "inputs of your score", independent=False)
"""A user's own score, by which plans are chosen, too."""


@dataclass(frozen=True)
class Certificate:
    """Loss of a compressed network's score against the original's, from the scores of single inputs."""

    loss: float
    low: float
    high: float
    inputs: int
    drop: float | None = None
    certified: bool = False
    needed: int | None = None
    basis: Basis = OWN_SCORE

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("basis"), **values}


def uncertified(basis: Basis) -> str:
    """Return a message that says why there is no certificate, and how to get one."""
    if basis.unit == "score":
        return "your score is one number for all inputs; return an array of one for each"
    return (
        f"{basis.what} are too few, or the outputs do not tell them apart: give more, or a score of your own"
    )


def certify(
    original: _Array, compressed: _Array, drop: float | None = None, basis: Basis = _ANY
) -> Certificate | None:
    """Return the interval of a loss from the scores of single inputs, shape (N,) each.

    Answers that are right or wrong are proportions. Where the original has all right, as in the agreement
    with itself, the compressed network's are binomial, whose exact interval covers at least 95 % (Clopper &
    Pearson, Biometrika 26, 1934); else the interval is that of paired proportions (Newcombe, Statistics in
    Medicine 17, 1998, pages 2635-2650, method 10). Other scores have Student's interval of the mean of the
    differences, which takes many inputs where few of them lose nearly everything.
    """
    before, after = (np.asarray(each, dtype=np.float64) for each in (original, compressed))
    if before.ndim != 1 or before.shape != after.shape or not np.isfinite([before, after]).all():
        raise ConfigError(
            f"scores of single inputs have the shapes {before.shape} and {after.shape}, or are not finite; "
            "return one finite number for each input, in the same order for every network"
        )
    count = len(before)
    counted = bool(np.isin([before, after], (0, 1)).all())
    if count < 1 or (count < 2 and not counted):
        return None
    interval: Callable[[int], tuple[float, float]]  # of the loss, were as much lost on so many inputs
    if counted and before.all():
        interval = partial(_exact, float(1 - after.mean()))
    elif counted:
        interval = partial(_newcombe, before.astype(bool), after.astype(bool))
    else:
        interval = partial(_student, before - after)
    loss = float((before - after).mean())
    low, high = interval(count)
    needed = None if drop is None else _needed(loss, lambda inputs: interval(inputs)[1], drop)
    certified = drop is not None and high <= drop and basis.independent
    return Certificate(loss, low, high, count, drop, certified, needed, basis)


def _exact(share: float, count: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share of inputs."""
    tail, lost = (1 - CONFIDENCE) / 2, share * count  # real, where it is told of other numbers of inputs
    low = float(betaincinv(lost, count - lost + 1, tail)) if lost > 0 else 0.0
    high = float(betaincinv(lost + 1, count - lost, 1 - tail)) if lost < count else 1.0
    return low, high


def _newcombe(before: _Array, after: _Array, count: int) -> tuple[float, float]:
    """Return Newcombe's interval of the difference of paired proportions, his method 10."""
    both, lost = float((before & after).mean()), float((before & ~after).mean())
    gained, none = float((~before & after).mean()), float((~before & ~after).mean())
    first, second = both + lost, both + gained
    product = first * (1 - first) * second * (1 - second)
    excess = both * none - lost * gained
    if excess > 0:
        excess = max(excess - 1 / (2 * count), 0.0)  # the continuity correction of its phi
    phi = excess / product**0.5 if product > 0 else 0.0
    (low1, high1), (low2, high2) = _wilson(first, count), _wilson(second, count)
    down, up = (first - low1, high2 - second), (high1 - first, second - low2)
    loss = lost - gained
    return (
        loss - max(0.0, down[0] ** 2 - 2 * phi * down[0] * down[1] + down[1] ** 2) ** 0.5,
        loss + max(0.0, up[0] ** 2 - 2 * phi * up[0] * up[1] + up[1] ** 2) ** 0.5,
    )


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (JASA 22, 1927)."""
    centre = share + _Z**2 / (2 * count)
    width = _Z * (share * (1 - share) / count + _Z**2 / (4 * count**2)) ** 0.5
    whole = 1 + _Z**2 / count
    return max(0.0, (centre - width) / whole), min(1.0, (centre + width) / whole)


def _student(differences: _Array, count: int) -> tuple[float, float]:
    """Return Student's interval of the mean of differences."""
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation / count**0.5
    return mean - half, mean + half


def _needed(loss: float, upper: Callable[[int], float], drop: float) -> int | None:
    """Return the least number of inputs whose upper end is at most `drop`."""
    if loss >= drop:
        return None
    enough = 2
    while upper(enough) > drop:
        enough *= 2
        if enough > _MOST_INPUTS:
            return None
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if upper(middle) <= drop else (middle, enough)
    return enough
