"""Layers that may leave the network together with their residual block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from decomposition.operations import Operation


@dataclass(frozen=True)
class Removal:
    """How a layer can leave the network."""

    operation: Operation
    last: bool


def whole_blocks(removals: Mapping[str, Removal], names: Sequence[str]) -> dict[str, Removal]:
    """Return the removals of blocks whose layers may all change and follow each other."""
    counts = Counter(removal.operation for removal in removals.values())
    whole: dict[str, Removal] = {}
    for operation, run in groupby(names, lambda name: removals[name].operation if name in removals else None):
        layers = list(run)
        if operation is not None and len(layers) == counts[operation]:
            whole.update({name: removals[name] for name in layers})
    return whole
