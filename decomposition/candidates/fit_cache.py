"""Where a library of fits keeps what it has computed: in memory, and on disk for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from decomposition.calibration.input_selection import Selection
from decomposition.files import replacing
from decomposition.fit.fitting import Fit
from decomposition.network.modes import WeightModes
from decomposition.operations import Factorise, Operation


@dataclass
class FitCache:
    """What was computed of a network's layers.

    Attributes:
        fits: By layer and factorisation.
        selections: Input channels that are read, by layer and number of channels.
        rounded: Rounded cores, or the rounded weight of a dense layer, in float32: by layer, what is done
            with it, and how many input channels it reads (`None` for all).
    """

    fits: dict[tuple[str, Factorise], Fit] = field(default_factory=dict)
    selections: dict[tuple[str, int], Selection] = field(default_factory=dict)
    rounded: dict[tuple[str, tuple[Operation, ...], int | None], tuple[torch.Tensor, ...]] = field(
        default_factory=dict
    )

    def of(self, name: str) -> FitCache:
        """Return what was computed of one layer."""
        return FitCache(
            {key: each for key, each in self.fits.items() if key[0] == name},
            {key: each for key, each in self.selections.items() if key[0] == name},
            {key: each for key, each in self.rounded.items() if key[0] == name},
        )

    def beyond(self, other: FitCache) -> FitCache:
        """Return what another one does not hold."""
        return FitCache(
            {key: each for key, each in self.fits.items() if key not in other.fits},
            {key: each for key, each in self.selections.items() if key not in other.selections},
            {key: each for key, each in self.rounded.items() if key not in other.rounded},
        )

    def update(self, other: FitCache) -> None:
        """Take everything over that another one holds."""
        self.fits.update(other.fits)
        self.selections.update(other.selections)
        self.rounded.update(other.rounded)


@dataclass(frozen=True)
class FitFolder:
    """Fits on disk, a file each.

    Attributes:
        path: The folder; it is made with the first file.
    """

    path: Path

    def read(self, key: str, operation: Factorise, modes: WeightModes) -> Fit | None:
        """Return the fit of the problem that `key` stands for; `None` if there is none or it is damaged."""
        path = self._file(key, operation.ranks)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                count = len(file.keys())
                cores = [file.get_tensor(f"core{j}") for j in range(count)]
                error = float(file.metadata()["error"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError):
            return None  # no harm: the fit is computed again and overwrites it
        return Fit(cores, error, operation.tensor_format, modes, operation.ranks)

    def write(self, key: str, operation: Factorise, fit: Fit) -> None:
        """Keep a fit."""
        self.path.mkdir(parents=True, exist_ok=True)
        cores = {f"core{j}": core.contiguous() for j, core in enumerate(fit.cores)}
        with replacing(self._file(key, operation.ranks)) as temporary:
            save_file(cores, temporary, metadata={"error": repr(fit.error)})

    def _file(self, key: str, ranks: Sequence[int]) -> Path:
        return self.path / f"{key}-{'-'.join(map(str, ranks))}.safetensors"
