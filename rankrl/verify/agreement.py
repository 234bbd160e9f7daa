"""Measure the agreement of a compressed network's outputs with the original's on unseen inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decomposition.calibration.units import Array, Units, in_parts
from rankrl.errors import ExportError
from rankrl.onnx.output_scores import OutputKind, OutputScore, output_score


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
