"""Fits of single layers, from disk or computed, and what a change of a layer's weight costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from decomposition.cache import Cache, digest
from decomposition.calibration.metric import Metric, times
from decomposition.calibration.sensitivity_root import floored, symmetric_root
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.fitting import Fit, Fitter
from decomposition.network.layers import LayerSpec
from decomposition.operations import ChannelFactors, Factorise

# Part of the keys of fits on disk: raised when the same problem gets other cores than before.
_VERSION = 5


class LayerFits:
    """Fits of a network's layers to what the network makes of their outputs."""

    def __init__(
        self,
        specs: Mapping[str, LayerSpec],
        weights: Mapping[str, torch.Tensor],
        metrics: Mapping[str, Metric | None],
        sensitivities: Mapping[str, torch.Tensor],
        options: FitOptions,
        disk: Cache,
    ) -> None:
        self.specs, self.weights, self.metrics, self.sensitivities = specs, weights, metrics, sensitivities
        self.options = options
        self._disk = disk
        self._keys: dict[tuple[str, str, ChannelFactors | None], str] = {}
        self._fitter: tuple[tuple[str, str, ChannelFactors | None], Fitter] | None = None

    def part(self, name: str) -> LayerFits:
        """Return the fits of one layer alone, for a process of its own."""
        return LayerFits(
            {name: self.specs[name]},
            {name: self.weights[name]},
            {name: self.metrics[name]},
            {key: sensitivity for key, sensitivity in self.sensitivities.items() if key == name},
            self.options,
            self._disk,
        )

    def forget(self) -> None:
        """Free what the last layer's fits have in common, which is large."""
        self._fitter = None

    def fit(self, name: str, operation: Factorise) -> Fit:
        """Return the fit of a layer, from disk or computed."""

        def compute() -> dict[str, torch.Tensor]:
            fit = self._compute(name, operation)
            cores = {f"core{j}": core for j, core in enumerate(fit.cores)}
            return {"error": torch.tensor(fit.error, dtype=torch.float64), **cores}

        if self._disk.folder is None:
            return self._compute(name, operation)
        key = "-".join(map(str, (self._key(name, operation), *operation.ranks)))
        kept = self._disk.tensors("fit", key, compute)
        cores = [kept[f"core{j}"] for j in range(len(kept) - 1)]
        modes = operation.modes(self.specs[name])
        return Fit(cores, float(kept["error"]), operation.tensor_format, modes, operation.ranks)

    def _compute(self, name: str, operation: Factorise) -> Fit:
        key = (name, operation.format, operation.factors)
        try:
            if self._fitter is None or self._fitter[0] != key:
                fitter = Fitter(
                    operation.tensor_format,
                    self.weights[name],
                    operation.modes(self.specs[name]),
                    self.metrics[name],
                    self.sensitivities.get(name),
                    like=self._fitter[1] if self._fitter is not None and self._fitter[0][0] == name else None,
                )
                self._fitter = (key, fitter)  # the last one's memory is free before this one takes its own
            return self._fitter[1].fit(operation.ranks, self.options)
        except DecompositionError as error:
            raise DecompositionError(f"layer {name!r}: {error}") from error

    def root(self, name: str) -> torch.Tensor | None:
        """Return the square root of a layer's sensitivity, `None` where it has none."""
        sensitivity = self.sensitivities.get(name)
        return None if sensitivity is None else symmetric_root(sensitivity)

    def _key(self, name: str, operation: Factorise) -> str:
        """Hash everything that a fit of this layer depends on but its ranks."""
        key = (name, operation.format, operation.factors)
        if key not in self._keys:
            modes = operation.modes(self.specs[name])
            kernel = modes.kernel_size if operation.tensor_format.splits_kernel else modes.kernel
            self._keys[key] = digest(
                _VERSION,
                operation.format,
                (modes.out, modes.inp, kernel),
                self.options,
                self.weights[name],
                self.metrics[name],
                self.sensitivities.get(name),
            )
        return self._keys[key]

    def lost(self, name: str, weight: torch.Tensor) -> float:
        """Return the share of its output's power that a layer loses with this weight."""
        rows = self.weights[name].flatten(1)
        whole = self.power(name, rows)
        return max(0.0, self.power(name, rows - weight.flatten(1))) / whole if whole > 0 else 0.0

    def power(self, name: str, rows: torch.Tensor) -> float:
        """Return the power at the network's output of a change (out, columns) of a layer's weight."""
        metric, sensitivity = self.metrics[name], self.sensitivities.get(name)
        weighed = rows if metric is None else times(rows, metric)
        weighed = weighed if sensitivity is None else floored(sensitivity) @ weighed
        return float((weighed * rows).sum())

    def importance(self, name: str) -> float:
        """Return what the network's output loses when all of a layer's output is lost: E[y' G y].

        It makes the squared errors of different layers comparable; 1 without moments or a sensitivity.
        """
        if self.metrics[name] is None or name not in self.sensitivities:
            return 1.0
        return self.power(name, self.weights[name].flatten(1))
