"""What a library of fits has computed, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decomposition.calibration.input_selection import Selection
from decomposition.fit.fitting import Fit
from decomposition.operations import Factorise, Operation


@dataclass
class FitCache:
    """What was computed of a network's layers."""

    fits: dict[tuple[str, Factorise], Fit] = field(default_factory=dict)
    selections: dict[tuple[str, int], Selection] = field(default_factory=dict)
    rounded: dict[tuple[str, tuple[Operation, ...], int | None], tuple[torch.Tensor, ...]] = field(
        default_factory=dict
    )

    def of(self, name: str) -> FitCache:
        """Return what was computed of one layer."""
        return FitCache(
            {key: fit for key, fit in self.fits.items() if key[0] == name},
            {key: selection for key, selection in self.selections.items() if key[0] == name},
            {key: cores for key, cores in self.rounded.items() if key[0] == name},
        )

    def beyond(self, other: FitCache) -> FitCache:
        """Return what another one does not hold."""
        return FitCache(
            {key: fit for key, fit in self.fits.items() if key not in other.fits},
            {key: selection for key, selection in self.selections.items() if key not in other.selections},
            {key: cores for key, cores in self.rounded.items() if key not in other.rounded},
        )

    def update(self, other: FitCache) -> None:
        """Take everything over that another one holds."""
        self.fits.update(other.fits)
        self.selections.update(other.selections)
        self.rounded.update(other.rounded)
