"""Files that are timed in turns: here, by a kit on another device, or looked up in the table of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from rankrl.onnx.runtimes import Batch

Contents = tuple[Sequence[ir.Model], Batch]
"""The files of a group, and the inputs that all of them take."""


@dataclass(frozen=True)
class FileGroup:
    """Files that are timed in turns on the same inputs, an untimed pass of each before every timed one.

    Others have pushed its tensors out of the processor's cache, where those of a network that runs again and
    again stay.
    """

    names: tuple[str, ...]
    contents: Callable[[], Contents]
    runs: int
    warm_up: int = 6


class Stopwatch(Protocol):
    """What knows how long files take."""

    def times(self, group: FileGroup) -> np.ndarray:
        """Return the median milliseconds of each file, infinity for one that does not run."""
