"""The registry of trackers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from decomposition.registry import Registry
from rankrl.errors import ConfigError
from rankrl.option_types import check_options, parameter_types
from rankrl.runs.tracking.base import Tracker

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
    """Import a package that is installed by an extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking={extra} needs the package {module.partition('.')[0]} ({error}); install it with "
            f"`pip install 'rankrl[{extra}]'`, or choose tracking=csv"
        ) from error
