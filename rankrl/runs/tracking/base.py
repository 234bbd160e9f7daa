"""The contract of a tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path


class Tracker(ABC):
    """Writes the numbers of one run somewhere; subclasses are registered with `@register_tracker`.

    A tracker is made once for each run before anything is computed, so missing packages or settings show up
    early. A resumed run makes it anew in the same folder: points that were written stay.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def configuration(  # noqa: B027 - a tracker may leave it out
        self, values: Mapping[str, str]
    ) -> None:
        """Keep the run's configuration, flattened: `search.episodes` to `100`. Nothing by default."""

    @abstractmethod
    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of one step.

        Args:
            stage: `search`, `train` or `finetune`.
            step: Number of the episode or epoch, from 1 on.
            values: Numbers by name; a stage always has the same names.
        """

    @abstractmethod
    def result(self, values: Mapping[str, float]) -> None:
        """Keep the final numbers, flattened: `finetuned.accuracy` to `0.91`."""

    def close(self) -> None:  # noqa: B027 - a tracker may leave it out
        """Flush and close; does nothing by default."""
