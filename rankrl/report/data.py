"""The data of a report: plain rows and numbers, as a run folder holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.training import EpochRow

WARM_UP_PHASE = "warm-up"
"""Phase of the episodes that explore at random before the agent learns."""

PRESET_PHASE = "preset"
"""Phase of the plan that a search starts from, the reference for all that follow."""


@dataclass(frozen=True)
class LayerRow:
    """One layer before and after."""

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    error: float | None = None
    reason: str = ""
    channels: tuple[int, int] | None = None
    format: str = ""
    precision: str = ""

    @property
    def kept(self) -> float:
        """The fraction of the layer's parameters that is left."""
        return self.params_after / self.params_before

    @property
    def is_compressed(self) -> bool:
        """Whether the layer is smaller than it was; with channels removed, its inputs may be all it lost."""
        return not self.reason or self.params_after < self.params_before


def layer_formats(layers: Sequence[LayerRow]) -> list[str]:
    """Return the names of the tensor formats that layers have, sorted."""
    return sorted({row.format for row in layers} - {""})


@dataclass(frozen=True)
class RunReport:
    """Everything that one run's page shows; what is empty is left out of the page."""

    metrics: Mapping[str, Any]
    layers: Sequence[LayerRow] = ()
    episodes: Sequence[EpisodeRow] = ()
    epochs: Sequence[EpochRow] = ()
    setup: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[str, str]] = ()
