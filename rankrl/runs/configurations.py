"""Configurations as run folders record them, and how they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MISSING = "not set"
_NETWORK = "network"  # recorded as a hash, which tells a reader nothing
_LONGEST_SHOWN = 60
_MOST_NAMED = 3
# Options that change nothing in a run's results.
_WITHOUT_EFFECT = (
    "resume",
    "reuse",
    "overwrite",
    "plugins",
    "tracking",
    *(f"search.{name}" for name in ("workers", "cluster", "worker_cpus", "worker_gpus")),
)


def with_effect(config: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the part of a configuration that a run's results depend on."""
    return {
        name: with_effect(value, f"{within}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{within}{name}" not in _WITHOUT_EFFECT
    }


def digest(config: Mapping[str, Any]) -> str:
    """Return what tells a configuration from those with other results."""
    text = json.dumps(with_effect(as_recorded(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the options in which two configurations differ, in words; empty where there are none."""
    changes = list(_changes(before, after))
    return "; ".join(changes[:_MOST_NAMED]) + ("; ..." if len(changes) > _MOST_NAMED else "")


def as_recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as its record holds it."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain


def _changes(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Yield `option was A, is now B` for every option in which two configurations differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{name}.{key}" if name else str(key)
            yield from _changes(before.get(key, _MISSING), after.get(key, _MISSING), inner)
    elif before != after and name == _NETWORK:
        yield f"{name} was another one, with other layers or weights"
    elif before != after:
        yield f"{name} was {_brief(before)}, is now {_brief(after)}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
