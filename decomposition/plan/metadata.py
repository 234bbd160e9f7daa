"""Free-form metadata of a plan: any values that JSON can hold exactly."""

from __future__ import annotations

import math
from typing import Any

from decomposition.errors import PlanError


def checked_metadata(metadata: Any, source: str) -> dict[str, Any]:
    """Return a copy of metadata that survives JSON unchanged."""
    if not isinstance(metadata, dict):
        raise PlanError(f"{source}: metadata must be an object, got {type(metadata).__name__}")
    copied: dict[str, Any] = _checked(metadata, source, "metadata")
    return copied


def _checked(value: Any, source: str, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [_checked(entry, source, f"{name}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise PlanError(f"{source}: {name} has the key {key!r}; keys of metadata must be text")
        return {key: _checked(entry, source, f"{name}[{key!r}]") for key, entry in value.items()}
    raise PlanError(
        f"{source}: {name} is {value!r}; metadata holds what JSON can: text, finite numbers, booleans, null, "
        "and lists and dictionaries of them"
    )
