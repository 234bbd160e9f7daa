"""What becomes of one layer: an entry of a compression plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decomposition.errors import PlanError
from decomposition.formats import Ranks, get_format, list_formats
from decomposition.layers import LayerSpec
from decomposition.modes import WeightModes, modes_from_dict

_KEYS = {"name", "format", "ranks", "factors", "reason", "kept"}


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer.

    In a plan with kept channels, format and ranks are of the layer that is left when every layer's removed
    channels are gone, and so are the specs that its costs are counted from.

    Attributes:
        name: The layer's dotted name.
        format: Name of the tensor format; `None` keeps the layer dense.
        ranks: One rank a bond of the format; `()` when dense.
        factors: `{"out": [...], "in": [...]}` when channel counts are split (tensorised), else `None`.
        reason: Why the layer stays dense; `None` when it is decomposed.
        kept: The output channels that stay, sorted; `None` when all do.
    """

    name: str
    format: str | None = None
    ranks: Ranks = ()
    factors: Mapping[str, Sequence[int]] | None = None
    reason: str | None = None
    kept: tuple[int, ...] | None = None

    def modes(self, spec: LayerSpec) -> WeightModes:
        """Return how the layer's weight is read as a tensor."""
        return modes_from_dict(spec, dict(self.factors) if self.factors is not None else None)

    def params(self, spec: LayerSpec) -> int:
        """Count the layer's parameters under this entry, bias included."""
        if self.format is None:
            return spec.params
        bias = spec.out_channels if spec.bias else 0
        return get_format(self.format).params(self.modes(spec), self.ranks) + bias

    def macs(self, spec: LayerSpec) -> int:
        """Count the layer's multiply-accumulates for one model input under this entry."""
        if self.format is None:
            return spec.macs
        return get_format(self.format).macs(spec, self.modes(spec), self.ranks)


def without_growth(layer: LayerPlan, spec: LayerSpec) -> LayerPlan:
    """Return the entry, or a dense one with the reason if the layer would get no smaller."""
    if layer.format is None or layer.params(spec) < spec.params:
        return layer
    reason = (
        f"{layer.format} ranks {list(layer.ranks)} take {layer.params(spec)} parameters, "
        f"no fewer than the dense {spec.params}"
    )
    return LayerPlan(layer.name, reason=reason, kept=layer.kept)


def to_entry(layer: LayerPlan) -> dict[str, Any]:
    """Return the entry as plain values for JSON; what is not set is left out."""
    entry: dict[str, Any] = {"name": layer.name, "format": layer.format, "ranks": list(layer.ranks)}
    if layer.factors is not None:
        entry["factors"] = {side: list(values) for side, values in layer.factors.items()}
    if layer.reason is not None:
        entry["reason"] = layer.reason
    if layer.kept is not None:
        entry["kept"] = list(layer.kept)
    return entry


def from_entry(entry: Any, source: str) -> LayerPlan:
    """Read one entry of a plan's JSON; strict.

    Raises:
        PlanError: If an entry is missing, unknown or ill-typed.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise PlanError(f"{source}: every layer must be an object with a name, got {entry!r}")
    where = f"{source}, layer {entry['name']!r}"
    check_keys(entry, _KEYS, {"name", "format", "ranks"}, where)
    name, chosen, ranks, factors = entry["name"], entry["format"], entry["ranks"], entry.get("factors")
    if chosen is not None and chosen not in list_formats():
        raise PlanError(
            f"{where}: unknown format {chosen!r}; choose from {', '.join(list_formats())} or null"
        )
    if not isinstance(ranks, list) or any(type(rank) is not int or rank < 1 for rank in ranks):
        raise PlanError(f"{where}: ranks must be a list of integers of at least 1, got {ranks!r}")
    if (chosen is None) != (not ranks):
        raise PlanError(f"{where}: a decomposed layer needs ranks and a dense one has none, got {ranks!r}")
    if factors is not None:
        good = isinstance(factors, dict) and set(factors) == {"out", "in"}
        if not good or not all(
            isinstance(side, list) and side and all(type(n) is int and n > 0 for n in side)
            for side in factors.values()
        ):
            raise PlanError(f"{where}: factors must be {{'out': [...], 'in': [...]}}, got {factors!r}")
    reason = entry.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise PlanError(f"{where}: reason must be text, got {reason!r}")
    kept = entry.get("kept")
    if kept is not None and not _is_channel_list(kept):
        raise PlanError(
            f"{where}: kept must be a sorted list of distinct channel numbers, at least one, got {kept!r}"
        )
    return LayerPlan(name, chosen, tuple(ranks), factors, reason, None if kept is None else tuple(kept))


def check_keys(entry: Mapping[str, Any], allowed: set[str], required: set[str], source: str) -> None:
    """Refuse unknown and missing entries of a JSON object.

    Raises:
        PlanError: If there are any.
    """
    unknown, missing = sorted(set(entry) - allowed), sorted(required - set(entry))
    if unknown or missing:
        raise PlanError(
            f"{source}: unknown entries {unknown}, missing entries {missing}; allowed: {sorted(allowed)}"
        )


def _is_channel_list(kept: Any) -> bool:
    return (
        isinstance(kept, list)
        and bool(kept)
        and all(type(channel) is int and channel >= 0 for channel in kept)
        and kept == sorted(set(kept))
    )
