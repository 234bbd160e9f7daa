"""The trackers of one run, which can neither change nor stop it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankrl.errors import RankrlError
from rankrl.files import recording_entries
from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import create_tracker

if TYPE_CHECKING:
    from rankrl.plan_search.scores.history import EpisodeRow
    from rankrl.training import EpochRow

log = logging.getLogger(__name__)


class Tracking:
    """Passes numbers on to trackers; one that fails is reported once and left out from then on."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def configuration(self, config: Mapping[str, Any]) -> None:
        """Track the configuration, plain nested values."""
        values = {name: str(value) for name, value in flattened(config).items()}
        self._call_all(lambda tracker: tracker.configuration(values))

    def episode(self, row: EpisodeRow) -> None:
        """Track a scored plan."""
        names = ("reward", "best_reward", "accuracy", "params_kept", "macs_kept")
        self._point("search", row.episode, {name: getattr(row, name) for name in names})

    def epochs(self, stage: str) -> Callable[[EpochRow], None]:
        """Return the function that tracks the epochs of `train` or `finetune`."""

        def epoch(row: EpochRow) -> None:
            self._point(stage, row.epoch, {"loss": row.loss, "accuracy": row.accuracy, "lr": row.lr})

        return epoch

    def result(self, metrics: Mapping[str, Any]) -> None:
        """Track the numbers of metrics.json."""
        values = {
            name: float(value)
            for name, value in flattened(metrics).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._call_all(lambda tracker: tracker.result(values))

    def close(self) -> None:
        """Close the trackers."""
        self._call_all(lambda tracker: tracker.close())

    def _point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._call_all(lambda tracker: tracker.point(stage, step, values))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a full disk or a lost server must not cost hours of work
                self._trackers.remove(tracker)
                log.warning(
                    "%s stopped tracking; the run goes on: %s: %s",
                    type(tracker).__name__,
                    type(error).__name__,
                    error,
                )


NOT_TRACKED = Tracking(())
"""Tracks nothing."""


@contextmanager
def start_tracking(
    name: str, folder: Path, config: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Iterator[Tracking]:
    """Track a run for the length of the block."""
    tracking = Tracking(_trackers(name, folder, options or {}))
    tracking.configuration(config)
    try:
        yield tracking
    finally:
        tracking.close()


def _trackers(name: str, folder: Path, options: Mapping[str, Any]) -> list[Tracker]:
    if name == "none":
        return []
    trackers = [create_tracker("csv", folder)]
    if name != "csv":
        try:
            with recording_entries(folder, name):
                trackers.append(create_tracker(name, folder, **options))
        except RankrlError:
            raise
        except Exception as error:  # a server that does not answer, a folder that cannot be written
            log.warning("tracking=%s does not work; the run goes on without: %s", name, error)
    return trackers


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names; lists stay as they are.

    >>> flattened({"search": {"episodes": 100}, "seed": 0})
    {'search.episodes': 100, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
