"""Define the base class of trackers, register trackers by name, and track a run."""

from __future__ import annotations

import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from decomposition.registry import Registry
from rankrl.errors import ConfigError, RankrlError
from rankrl.files import recording_entries
from rankrl.option_types import check_options, parameter_types

if TYPE_CHECKING:
    from rankrl.plan_search.scores.history import EpisodeRow
    from rankrl.training import EpochRow


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


_TRACKERS: Registry[type[Tracker]] = Registry("tracker", ConfigError)
T = TypeVar("T", bound=type[Tracker])


def register_tracker(name: str) -> Callable[[T], T]:
    """Register the decorated class as the tracker `name`.

    Raises:
        ConfigError: The name is taken.
    """

    def register(tracker: T) -> T:
        return _TRACKERS.add(name, tracker)  # type: ignore[return-value]

    return register


def list_trackers() -> list[str]:
    """Return the names of the trackers, sorted."""
    return _TRACKERS.names()


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker."""
    return _TRACKERS[name]


def tracker_option_types(name: str) -> dict[str, Any]:
    """Return the types of a tracker's options, by name; `none` has none."""
    return {} if name == "none" else parameter_types(_TRACKERS[name], without=("folder",))


def create_tracker(name: str, folder: Path, **options: Any) -> Tracker:
    """Make a tracker."""
    check_options(f"tracker {name!r}", "tracking.options", options, tracker_option_types(name))
    return _TRACKERS[name](folder, **options)


def import_optional(module: str, extra: str) -> ModuleType:
    """Import a package of an optional extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking={extra} needs the package {module.partition('.')[0]} ({error}); install it with "
            f"`pip install 'rankrl[{extra}]'`, or choose tracking=csv"
        ) from error


log = logging.getLogger(__name__)


class Tracking:
    """Passes numbers on to trackers; a tracker that fails is reported once and dropped."""

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
        """Return a function that tracks the epochs of `train` or `finetune`."""

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
            except Exception as error:  # a full disk or a lost server must not end hours of work
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
    """Track a run within the block."""
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
