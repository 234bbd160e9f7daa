"""Plans of earlier versions, brought to the present one.

Versions 1 and 2 gave a layer one tensor format and ranks, version 2 kept channels as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decomposition.errors import PlanError
from decomposition.operations.base import check_keys

PLAIN_VERSION, PRUNING_VERSION = 1, 2
_KEYS = {"name", "format", "ranks", "factors", "reason", "kept"}
_KEPT_CHANNELS = "keep_channels"


def upgraded_entries(layers: list[Any], version: int, source: str) -> list[dict[str, Any]]:
    """Return the entries of a plan of version 1 or 2 as entries of lists of operations.

    Args:
        layers: The plan's layers as JSON values.
        version: The plan's version.
        source: Where the plan comes from, for messages.

    Raises:
        PlanError: If an entry is missing, unknown, contradicts another or does not belong to the version.
    """
    entries = [_upgraded(entry, source) for entry in layers]
    removes = any(isinstance(entry, dict) and entry.get("kept") is not None for entry in layers)
    if removes != (version == PRUNING_VERSION):
        raise PlanError(
            f"{source} has version {version}; version {PRUNING_VERSION} is for plans with kept channels, "
            f"version {PLAIN_VERSION} for those without"
        )
    return entries


def _upgraded(entry: Any, source: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise PlanError(f"{source}: every layer must be an object with a name, got {entry!r}")
    where = f"{source}, layer {entry['name']!r}"
    check_keys(entry, _KEYS, {"name", "format", "ranks"}, where)
    chosen, ranks, kept = entry["format"], entry["ranks"], entry.get("kept")
    operations: list[dict[str, Any]] = []
    if kept is not None:
        operations.append({"operation": _KEPT_CHANNELS, "indices": kept})
    if (chosen is None) != (ranks == []):
        raise PlanError(f"{where}: a decomposed layer needs ranks and a dense one has none, got {ranks!r}")
    if chosen is not None:
        factors = entry.get("factors")
        operations.append(
            {"operation": "factorise", "format": chosen, "ranks": ranks}
            | ({} if factors is None else {"factors": factors})
        )
    reason = entry.get("reason")
    return {"name": entry["name"], "operations": operations} | ({} if reason is None else {"reason": reason})
