"""How good a compressed network is: how far it agrees with the original on inputs that nothing saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rankrl.export.errors import ExportError

Array = np.ndarray[Any, np.dtype[Any]]


class Answers(Protocol):
    """What answers batches of inputs: a session, or a network."""

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""

    def run(self, feed: Any, /) -> list[Array]:
        """Return all outputs for one batch."""


@dataclass(frozen=True)
class OutputAgreement:
    """How far one output agrees.

    Attributes:
        name: The output's name.
        error: |compressed - original| / |original|, over all its numbers.
        top1: On how many inputs its largest number is in the same place, as a fraction; None where it is no
            scores of classes: where it has not two axes, or one class.
    """

    name: str
    error: float
    top1: float | None


def agreement(original: Answers, compressed: Answers, batches: Sequence[Any]) -> list[OutputAgreement]:
    """Compare the outputs of two networks.

    Args:
        original: The original network.
        compressed: The compressed one, with the same outputs.
        batches: Inputs.

    Raises:
        ExportError: There are no inputs, or an output has another shape than the original's.
    """
    if not batches:
        raise ExportError("there are no inputs to compare the networks on")
    names = original.output_names
    lost, whole = np.zeros(len(names)), np.zeros(len(names))
    same: list[list[Array]] = [[] for _ in names]
    for feed in batches:
        for index, (before, after) in enumerate(zip(original.run(feed), compressed.run(feed), strict=True)):
            if before.shape != after.shape:
                raise ExportError(
                    f"the output {names[index]!r} has the shape {after.shape} in the compressed network, "
                    f"{before.shape} in the original"
                )
            if before.dtype.kind not in "fiub":
                continue
            known, found = before.astype(np.float64), after.astype(np.float64)
            lost[index] += np.square(found - known).sum()
            whole[index] += np.square(known).sum()
            if before.dtype.kind == "f" and before.ndim == 2 and before.shape[1] > 1:
                same[index].append(before.argmax(1) == after.argmax(1))
    return [
        OutputAgreement(
            name,
            float(np.sqrt(lost[index] / whole[index])) if whole[index] > 0 else float(np.sqrt(lost[index])),
            float(np.concatenate(same[index]).mean()) if same[index] else None,
        )
        for index, name in enumerate(names)
    ]


def agreement_score(found: Sequence[OutputAgreement]) -> float:
    """Return one number for several outputs, 1 at most: top-1 agreement, or 1 - error where there is none."""
    return float(np.mean([1 - each.error if each.top1 is None else each.top1 for each in found]))
