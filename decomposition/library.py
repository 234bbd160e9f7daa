"""Cached fits of every layer at every rank that was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from decomposition.curves import RankCurve, candidate_ranks
from decomposition.errors import DecompositionError
from decomposition.files import replacing
from decomposition.fitting import FAST, Fit, FitOptions, fit_weight, symmetric_root
from decomposition.formats import Ranks, get_format
from decomposition.layers import DecomposableModule, LayerSpec
from decomposition.metric import Metric, times, to_bytes
from decomposition.modes import WeightModes
from decomposition.moments import InputMoments
from decomposition.plan import LayerPlan


class FitLibrary:
    """Fits of one model's layers in one format, each computed once.

    Args:
        model: The dense model; its weights are copied.
        specs: The compressible layers.
        tensor_format: Name of the format.
        moments: Moments by layer name (`collect_moments`); `None` fits to the weights.
        sensitivities: Sensitivities by layer name (`collect_sensitivities`), which weigh output channels
            within a layer and, with moments, layers against each other; layers without one count evenly.
        tensorised: Split channel counts into small factors.
        centred: Measure errors around the mean output, for evaluators that correct the mean (a bias or the
            batch norm behind the layer); meaningless without moments.
        multiple: Candidate ranks are multiples of it (`candidate_ranks`).
        options: How much work each fit may do.
        folder: Where fits are kept on disk for the next run with the same weights, moments and options;
            `None` keeps them in memory only.

    Raises:
        DecompositionError: If moments of a layer are missing.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[LayerSpec],
        tensor_format: str,
        *,
        moments: dict[str, InputMoments] | None = None,
        sensitivities: Mapping[str, torch.Tensor] | None = None,
        tensorised: bool = False,
        centred: bool = True,
        multiple: int = 1,
        options: FitOptions = FAST,
        folder: Path | None = None,
    ) -> None:
        self.format = get_format(tensor_format)
        self.specs = {spec.name: spec for spec in specs}
        self.options = options
        self.multiple = multiple
        self.folder = folder
        self.moments = moments
        self.sensitivities = dict(sensitivities or {})
        modules = dict(model.named_modules())
        self.weights = {name: weight_of(modules[name]) for name in self.specs}
        self.modes: dict[str, WeightModes] = {
            spec.name: self.format.modes(spec, tensorised=tensorised) for spec in specs
        }
        self._metrics: dict[str, Metric | None] = dict.fromkeys(self.specs)
        if moments is not None:
            missing = sorted(set(self.specs) - set(moments))
            if missing:
                raise DecompositionError(
                    f"no input moments for layers {', '.join(missing)}; collect them first"
                )
            self._metrics = {name: moments[name].metric(centred=centred) for name in self.specs}
        self._fits: dict[tuple[str, Ranks], Fit] = {}
        self._keys: dict[str, str] = {}
        self._roots: dict[str, torch.Tensor] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._keys = {name: self._key(name) for name in self.specs}

    def fit(self, name: str, ranks: Ranks) -> Fit:
        """Return the fit of layer `name` at `ranks` (one a bond), from memory, disk or computed now.

        Raises:
            DecompositionError: If the ranks are not feasible or the weight is not finite.
        """
        ranks = self.format.check_ranks(self.modes[name], ranks, name)
        if (name, ranks) not in self._fits:
            fit = self._read(name, ranks)
            if fit is None:
                fit = self._compute(name, ranks)
                self._write(name, ranks, fit)
            self._fits[name, ranks] = fit
        return self._fits[name, ranks]

    def weight(self, name: str, ranks: Ranks) -> torch.Tensor:
        """Return the reconstructed weight (out, in, kernel) of a fit, float64."""
        return self.format.reconstruct(self.fit(name, ranks).cores, self.modes[name])

    def curve(self, name: str, *, limit: int = 16) -> RankCurve:
        """Fit the candidates of a layer and return its curve, the dense layer last."""
        return self.fitted_curve(self.unfitted_curve(name, limit=limit))

    def fitted_curve(self, curve: RankCurve) -> RankCurve:
        """Fit the candidates of an unfitted curve and return it with their errors."""
        name = curve.spec.name
        errors = [self.fit(name, entry.ranks).error for entry in curve.entries[:-1]]
        return replace(curve, errors=np.array([*errors, 0.0]), importance=self.importance(name))

    def unfitted_curve(self, name: str, *, limit: int = 16) -> RankCurve:
        """Return the candidates of a layer and their costs; errors are 1 but for the dense layer's 0."""
        spec, modes = self.specs[name], self.modes[name]
        factors = None if modes.plain else modes.to_dict()
        spectra = self.format.spectra(self.weights[name], modes, self._metrics[name], self._root(name))
        ranks = candidate_ranks(
            self.format, spec, modes, limit=limit, multiple=self.multiple, spectra=spectra
        )
        reason = "dense is the better choice here" if ranks else "no rank makes it smaller"
        entries = (
            *(LayerPlan(name, self.format.name, each, factors) for each in ranks),
            LayerPlan(name, reason=reason),
        )
        return RankCurve(
            spec=spec,
            entries=entries,
            params=np.array([entry.params(spec) for entry in entries], dtype=np.int64),
            macs=np.array([entry.macs(spec) for entry in entries], dtype=np.int64),
            errors=np.array([*(1.0 for _ in ranks), 0.0]),
        )

    def importance(self, name: str) -> float:
        """Return what the network's output loses when all of a layer's output is lost: E[y' G y].

        It makes the squared errors of different layers comparable; 1 without moments or a sensitivity.
        """
        metric, root = self._metrics[name], self._root(name)
        if metric is None or root is None:
            return 1.0
        seen = root @ self.weights[name].flatten(1)
        return float((times(seen, metric) * seen).sum())

    def curves(self, *, limit: int = 16, progress: Callable[[str], None] | None = None) -> list[RankCurve]:
        """Return the curve of every layer in forward order, calling `progress` with each finished name."""
        curves = []
        for name in self.specs:
            curves.append(self.curve(name, limit=limit))
            if progress is not None:
                progress(name)
        return curves

    def _compute(self, name: str, ranks: Ranks) -> Fit:
        try:
            return fit_weight(
                self.format,
                self.weights[name],
                self.modes[name],
                ranks,
                self._metrics[name],
                self.options,
                sensitivity=self.sensitivities.get(name),
            )
        except DecompositionError as error:
            raise DecompositionError(f"layer {name!r}: {error}") from error

    def _root(self, name: str) -> torch.Tensor | None:
        if name not in self._roots and name in self.sensitivities:
            self._roots[name] = symmetric_root(self.sensitivities[name])
        return self._roots.get(name)

    def _key(self, name: str) -> str:
        """Hash everything that a fit of this layer depends on but its ranks."""
        digest = hashlib.sha256()
        digest.update(repr((self.format.name, self.modes[name], self.options)).encode())
        digest.update(self.weights[name].numpy().tobytes())
        for matrix in (self._metrics[name], self.sensitivities.get(name)):
            digest.update(b"none" if matrix is None else to_bytes(matrix))
        return digest.hexdigest()[:32]

    def _path(self, name: str, ranks: Ranks) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{self._keys[name]}-{'-'.join(map(str, ranks))}.safetensors"

    def _read(self, name: str, ranks: Ranks) -> Fit | None:
        path = self._path(name, ranks)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                count = len(file.keys())
                cores = [file.get_tensor(f"core{j}") for j in range(count)]
                error = float(file.metadata()["error"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError):
            return None  # a damaged cache entry is no harm: the fit is computed again and overwrites it
        return Fit(cores, error)

    def _write(self, name: str, ranks: Ranks, fit: Fit) -> None:
        path = self._path(name, ranks)
        if path is None:
            return
        cores = {f"core{j}": core.contiguous() for j, core in enumerate(fit.cores)}
        with replacing(path) as temporary:
            save_file(cores, temporary, metadata={"error": repr(fit.error)})


def weight_of(module: DecomposableModule) -> torch.Tensor:
    """Return a layer's weight as float64 (out, in, kernel) on the CPU."""
    weight = module.weight.detach()
    return weight.double().cpu().reshape(weight.shape[0], weight.shape[1], -1)
