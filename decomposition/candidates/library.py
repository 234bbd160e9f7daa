"""Cached fits of every layer in every format and at every rank that was asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from decomposition.cache import Cache, digest
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.calibration.input_check import checked_batches
from decomposition.calibration.input_selection import Narrowing, Selection, select_inputs
from decomposition.calibration.metric import Metric, times
from decomposition.calibration.moments import InputMoments, collect_moments
from decomposition.calibration.sensitivity import collect_sensitivities
from decomposition.calibration.sensitivity_root import floored, symmetric_root
from decomposition.candidates.candidates import Candidate, CandidateSet
from decomposition.candidates.fit_cache import FitCache
from decomposition.candidates.listing import CandidateLister, changing_layers, count_norm_parameters, within
from decomposition.candidates.processes import Spread, in_processes
from decomposition.errors import DecompositionError
from decomposition.fit.fitting import CHOOSING, Fit, FitOptions, Fitter
from decomposition.fit.lockstep import RefitProblem
from decomposition.fit.rounded_stages import amplification
from decomposition.formats import TensorFormat
from decomposition.formats.factorised import FactorisedLayer
from decomposition.network.geometry import Geometry
from decomposition.network.inputs import ExampleInputs
from decomposition.network.layers import DecomposableModule, LayerSpec, weight_of
from decomposition.network.modes import WeightModes
from decomposition.network.wrappers import unwrapped
from decomposition.operations import (
    ChannelFactors,
    Factorise,
    LayerOperation,
    Operation,
    Quantise,
)
from decomposition.operations.block_removal import Removal
from decomposition.operations.quantise import ACTIVATION_NOISE

# Part of the keys of fits on disk: raised when the same problem gets other cores than before.
_VERSION = 4


class FitLibrary:
    """Fits of one model's layers in one format or several, each computed once.

    Args:
        model: The dense model; its weights are copied.
        specs: The compressible layers.
        formats: Name of the format, or names of several that every layer may choose from.
        moments: Moments by layer name (`collect_moments`); `None` fits to the weights.
        sensitivities: Sensitivities by layer name (`collect_sensitivities`), which weigh output channels
            within a layer and, with moments, layers against each other; layers without one count evenly.
        precisions: Names of what layers may compute with or be stored in (`PRECISIONS`); every candidate
            comes in each of them. The dense layer in float32 is always a candidate.
        unrounded: Names of layers that come in float32 alone, whatever the precisions.
        tensorised: Split channel counts into small factors.
        centred: Measure errors around the mean output, for evaluators that correct the mean (a bias or the
            batch norm behind the layer); meaningless without moments.
        multiple: Candidate ranks are multiples of it (`candidate_ranks`).
        narrowings: For layers that may read only some of their input channels: how many, and which layer
            loses the others.
        removals: For layers that may leave the network with their block: how.
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
        formats: str | Sequence[str],
        *,
        moments: dict[str, InputMoments] | None = None,
        sensitivities: Mapping[str, torch.Tensor] | None = None,
        precisions: Sequence[str] = ("float32",),
        unrounded: Collection[str] = (),
        tensorised: bool = False,
        centred: bool = True,
        multiple: int = 1,
        narrowings: Mapping[str, Narrowing] | None = None,
        removals: Mapping[str, Removal] | None = None,
        options: FitOptions = CHOOSING,
        folder: Path | None = None,
    ) -> None:
        self.lister = CandidateLister(
            specs,
            formats,
            precisions=precisions,
            unrounded=unrounded,
            tensorised=tensorised,
            multiple=multiple,
            narrowings=narrowings,
            removals=removals,
            norm_parameters=count_norm_parameters(model, specs),
        )
        self.specs = self.lister.specs
        self.options = options
        self._disk = Cache(folder)
        self.moments = moments
        self.sensitivities = dict(sensitivities or {})
        modules = dict(model.named_modules())
        self.weights = {name: weight_of(modules[name]) for name in self.specs}
        self._geometries = {name: Geometry.of(modules[name]) for name in self.specs}
        self._metrics: dict[str, Metric | None] = dict.fromkeys(self.specs)
        if moments is not None:
            missing = sorted(set(self.specs) - set(moments))
            if missing:
                raise DecompositionError(
                    f"no input moments for layers {', '.join(missing)}; collect them first"
                )
            self._metrics = {name: moments[name].metric(centred=centred) for name in self.specs}
        self.cache = FitCache()
        self._keys: dict[tuple[str, str, ChannelFactors | None], str] = {}
        self._fitter: tuple[tuple[str, str, ChannelFactors | None], Fitter] | None = None

    @property
    def formats(self) -> tuple[TensorFormat, ...]:
        """The formats that every layer may choose from."""
        return self.lister.formats

    def modes(self, name: str, tensor_format: TensorFormat) -> WeightModes:
        """Return how a layer's weight is read as a tensor in a format of the library."""
        return self.lister.modes(name, tensor_format)

    @classmethod
    def calibrated(
        cls,
        model: nn.Module,
        input_shape: ExampleInputs,
        formats: str | Sequence[str],
        calibration: CalibrationInputs | None,
        *,
        weigh_outputs: bool = True,
        skip: Sequence[str] = (),
        only: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ) -> FitLibrary:
        """Collect moments and sensitivities of a model's layers and return the library of their fits.

        Args:
            model: The dense model; left as it was.
            input_shape: Shape of one input without the batch axis, or a batch of inputs.
            formats: Name of the format, or names of several.
            calibration: A few hundred real, preprocessed model inputs: one batch of them (a tensor, a tuple
                or a dict of tensors), or batches, whose labels are left away; `None` fits to the weights
                alone.
            weigh_outputs: Weigh channels and layers by what the network's output makes of them.
            skip: Layers that stay as they are (`decomposition.network.layers.skipping`).
            only: Layers that alone may change; empty for all.
            seed: Seed of the sampled patches and of the directions that measure sensitivities.
            **options: Those of `FitLibrary`.

        Raises:
            DecompositionError: If the model has no layer to decompose or the calibration set cannot be used.
        """
        model = unwrapped(model)
        specs = changing_layers(model, input_shape, skip, only)
        options = within(specs, options)
        if calibration is not None:
            batches = checked_batches(calibration, model, [spec.name for spec in specs])
            options["moments"] = collect_moments(model, specs, batches, seed=seed)
            if weigh_outputs:
                options["sensitivities"] = collect_sensitivities(model, specs, batches, seed=seed)
        return cls(model, specs, formats, **options)

    def fit(self, name: str, operation: Factorise) -> Fit:
        """Return the fit of layer `name`, from memory, disk or computed now.

        Raises:
            DecompositionError: If the ranks are not feasible or the weight is not finite.
        """
        fits, key = self.cache.fits, (name, operation)
        if key not in fits:
            operation.check(self.specs[name])
            fits[key] = self._kept(name, operation)
        return fits[key]

    def selection(self, name: str, count: int) -> Selection:
        """Return the selection of `count` input channels of a layer that has a narrowing."""
        selections = self.cache.selections
        if (name, count) not in selections:
            arguments = self.weights[name], self._metrics[name], self.sensitivities.get(name)
            by_count = select_inputs(*arguments, self.lister.narrowings[name].counts)
            selections.update({(name, number): selection for number, selection in by_count.items()})
        return selections[name, count]

    def weight(
        self, name: str, operations: Sequence[Operation], reads: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the dense weight (out, in, kernel) that a layer under these operations equals, float64.

        Args:
            name: The layer.
            operations: What is done with it.
            reads: The input channels that it reads (`Candidate.reads`); `None` for all.

        Raises:
            DecompositionError: If an operation has no fits here.
        """
        if any(operation.removes for operation in operations):
            return torch.zeros_like(self.weights[name])
        plain = self.weights[name] if reads is None else self.selection(name, len(reads)).weight
        factors = None
        for operation in operations:
            if isinstance(operation, Factorise):
                factors = operation
            elif not isinstance(operation, Quantise):
                raise DecompositionError(
                    f"layer {name!r}: a library of fits knows nothing of {operation.kind!r}"
                )
        rounds = any(isinstance(operation, Quantise) for operation in operations)
        if factors is None:
            return self.rounded(name, operations, reads)[0].reshape(plain.shape) if rounds else plain
        cores = list(self.rounded(name, operations, reads)) if rounds else self.fit(name, factors).cores
        return factors.tensor_format.reconstruct(cores, factors.modes(self.specs[name]))

    def rounded(
        self, name: str, operations: Sequence[Operation], reads: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the rounded cores of a layer under factorisation and rounding, or its weight; float64."""
        rounded, key = self.cache.rounded, (name, tuple(operations), None if reads is None else len(reads))
        if key not in rounded:
            spec, weight = self.specs[name], self.weight(name, (), reads)
            dense = self._geometries[name].dense(dtype=torch.float32)
            with torch.no_grad():
                dense.weight.copy_(weight.reshape(dense.weight.shape))
            layer: nn.Module = dense
            problem = RefitProblem(weight, self._metrics[name])
            for operation in operations:
                if isinstance(operation, Factorise):
                    layer = operation.structure(layer, spec)
                    if isinstance(layer, FactorisedLayer):
                        layer.load(self.fit(name, operation).cores, layer.bias)
                elif isinstance(operation, LayerOperation):
                    layer = operation.fit(layer, spec, problem, sensitivity=None, options=self.options).module
            if isinstance(layer, FactorisedLayer):
                cores = layer.cores()
            else:
                cores = [cast(DecomposableModule, layer).weight]
            # In float32: there is one for every candidate in integers.
            rounded[key] = tuple(core.detach().clone() for core in cores)
        return tuple(core.double() for core in rounded[key])

    def cached(self, sites: Iterable[CandidateSet]) -> FitCache:
        """Return what the weights of these sites' candidates are made of, computing what is missing."""
        cache = FitCache()
        for site in sites:
            for candidate in site.candidates:
                operations, inputs = candidate.operations, candidate.inputs
                if inputs is not None:
                    cache.selections[site.name, inputs] = self.selection(site.name, inputs)
                for operation in operations:
                    if isinstance(operation, Factorise):
                        cache.fits[site.name, operation] = self.fit(site.name, operation)
                if any(isinstance(operation, Quantise) for operation in operations):
                    self.rounded(site.name, operations, candidate.reads)
                    key = (site.name, operations, inputs)
                    cache.rounded[key] = self.cache.rounded[key]
        return cache

    def _noise(self, name: str, operation: Factorise) -> float:
        """Return by what rounding between the stages is squared and multiplied on its way to the output."""
        modes = operation.modes(self.specs[name])
        cores = self.fit(name, operation).cores
        tensors = 1 if modes.kernel == 1 else 2
        return tensors * amplification(operation.tensor_format, cores, modes, self._metrics[name]) ** 2

    def _error(self, name: str, candidate: Candidate) -> float:
        """Return a candidate's relative output error.

        That of weights, factorised and rounded, is computed; what rounding of activations adds is estimated
        by a constant each.
        """
        operations, reads = candidate.operations, candidate.reads
        if candidate.removed is not None:
            # Nothing is left of what the block adds, whatever its other layers made.
            return 1.0 if self.lister.removals[name].last else 0.0
        factors = [operation for operation in operations if isinstance(operation, Factorise)]
        if any(isinstance(operation, Quantise) for operation in operations):
            squared = self._lost(name, self.weight(name, operations, reads))
        elif reads is not None:
            squared = self.selection(name, len(reads)).error ** 2
        else:
            squared = sum(self.fit(name, operation).error ** 2 for operation in factors)
        if candidate.integer:
            squared += ACTIVATION_NOISE**2 * (1 + sum(self._noise(name, operation) for operation in factors))
        return squared**0.5

    def _lost(self, name: str, weight: torch.Tensor) -> float:
        """Return the share of its output's power that a layer loses with this weight."""
        rows = self.weights[name].flatten(1)
        whole = self._power(name, rows)
        return max(0.0, self._power(name, rows - weight.flatten(1))) / whole if whole > 0 else 0.0

    def _power(self, name: str, rows: torch.Tensor) -> float:
        """Return what the network's output makes of a change of a layer's weight, shape (out, columns)."""
        metric, sensitivity = self._metrics[name], self.sensitivities.get(name)
        weighed = rows if metric is None else times(rows, metric)
        weighed = weighed if sensitivity is None else floored(sensitivity) @ weighed
        return float((weighed * rows).sum())

    def candidates(self, name: str, *, limit: int = 16) -> CandidateSet:
        """Fit the candidates of a layer, `limit` a format at most, and return them, the dense layer last."""
        return self.fitted(self.unfitted(name, limit=limit))

    def all_candidates(
        self,
        *,
        limit: int = 16,
        progress: Callable[[str], None] | None = None,
        workers: int | None = None,
    ) -> list[CandidateSet]:
        """Return every layer's candidates in forward order.

        Args:
            limit: Candidates a format and layer at most.
            progress: Called with the name of each layer that is finished.
            workers: Processes that fit layers side by side, with the same results; each holds one layer with
                its moments and computes in one thread. They import the main module, so a script needs its
                `if __name__ == "__main__":`. `None` fits in this process.

        Raises:
            DecompositionError: If a weight or a moment is not finite, naming the layer; if a worker ends
                without a result; or if `workers` is less than 1.
        """
        sites: dict[str, CandidateSet] = {}

        def finish(site: CandidateSet) -> None:
            sites[site.name] = site
            if progress is not None:
                progress(site.name)

        if workers is None:
            self.fit_all((self.unfitted(name, limit=limit) for name in self.specs), finish)
        else:
            self._fit_in_processes(((name, limit) for name in self._largest_first()), workers, finish)
        return [sites[name] for name in self.specs]

    def _part(self, name: str) -> FitLibrary:
        """Return a library of one layer, which shares everything with this one but the fits to come."""
        part = copy.copy(self)
        part.specs, part.weights = {name: self.specs[name]}, {name: self.weights[name]}
        part.moments, part._fitter = None, None
        part.sensitivities = {
            key: sensitivity for key, sensitivity in self.sensitivities.items() if key == name
        }
        part._metrics = {name: self._metrics[name]}
        part._geometries = {name: self._geometries[name]}
        part.cache = self.cache.of(name)
        return part

    def _largest_first(self) -> list[str]:
        """Return the layers in the order in which processes that share them are done soonest."""

        def work(name: str) -> int:
            spec, columns = self.specs[name], self.weights[name][0].numel()
            return spec.out_channels * columns**2 * (1 if spec.kernel_elements == 1 else 100)

        return sorted(self.specs, key=work, reverse=True)

    def fit_all(
        self,
        unfitted: Iterable[CandidateSet],
        finish: Callable[[CandidateSet], None],
        *,
        workers: int | Spread[Any, Any] | None = None,
    ) -> None:
        """Fit the candidates of several layers.

        Args:
            unfitted: From `unfitted`.
            finish: Called with the fitted candidates of each layer when it is finished; in order without
                workers.
            workers: As for `all_candidates`, or what does the work of `in_processes` elsewhere.

        Raises:
            DecompositionError: As `all_candidates` does.
        """
        if workers is None:
            for site in unfitted:
                finish(self.fitted(site))
            self._fitter = None  # what the last layer's fits had in common is large, and of no more use
        else:
            sites = {site.name: site for site in unfitted}
            jobs = ((name, sites[name]) for name in self._largest_first() if name in sites)
            self._fit_in_processes(jobs, workers, finish)

    def _fit_in_processes(
        self,
        jobs: Iterable[tuple[str, CandidateSet | int]],
        workers: int | Spread[Any, Any],
        finish: Callable[[CandidateSet], None],
    ) -> None:
        parts = ((self._part(name), site_or_limit) for name, site_or_limit in jobs)
        results: Iterator[tuple[FitCache, CandidateSet]]
        if callable(workers):
            results = workers(_fit_part, parts, "fits")
        else:
            results = in_processes(_fit_part, parts, workers, "fits")
        for computed, site in results:
            self.cache.update(computed)
            finish(site)

    def fitted(self, unfitted: CandidateSet) -> CandidateSet:
        """Fit candidates and return them with their errors."""
        name = unfitted.name
        selected = [
            replace(
                candidate,
                reads=None if candidate.reads is None else self.selection(name, len(candidate.reads)).reads,
            )
            for candidate in unfitted.candidates[:-1]
        ]
        fitted = [replace(candidate, error=self._error(name, candidate)) for candidate in selected]
        return replace(
            unfitted, candidates=(*fitted, unfitted.candidates[-1]), importance=self.importance(name)
        )

    def unfitted(self, name: str, *, limit: int = 16) -> CandidateSet:
        """Return a layer's candidates and their costs; errors are 1 but for the dense layer's 0.

        Args:
            name: The layer.
            limit: Candidate ranks a format at most.

        Raises:
            DecompositionError: If the layer's weight is not finite.
        """
        spec, weight = self.specs[name], self.weights[name]
        if not bool(torch.isfinite(weight).all()):
            raise DecompositionError(
                f"layer {name!r}: the weight holds NaN or infinite values; repair the checkpoint first"
            )
        root = None
        if spec.kernel_elements > 1 and any(tensor_format.own_ranks for tensor_format in self.formats):
            root = self._root(name)

        def spectra(tensor_format: TensorFormat) -> Sequence[np.ndarray]:
            modes = self.modes(name, tensor_format)
            return tensor_format.spectra(weight, modes, self._metrics[name], root)

        return self.lister.candidates(name, limit=limit, spectra=spectra)

    def importance(self, name: str) -> float:
        """Return what the network's output loses when all of a layer's output is lost: E[y' G y].

        It makes the squared errors of different layers comparable; 1 without moments or a sensitivity.
        """
        if self._metrics[name] is None or name not in self.sensitivities:
            return 1.0
        return self._power(name, self.weights[name].flatten(1))

    def _kept(self, name: str, operation: Factorise) -> Fit:
        """Return a fit that is on disk, or compute it."""

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
                self._fitter = None  # the last one's memory is free before the next one takes its own
                fitter = Fitter(
                    operation.tensor_format,
                    self.weights[name],
                    operation.modes(self.specs[name]),
                    self._metrics[name],
                    self.sensitivities.get(name),
                )
                self._fitter = (key, fitter)
            return self._fitter[1].fit(operation.ranks, self.options)
        except DecompositionError as error:
            raise DecompositionError(f"layer {name!r}: {error}") from error

    def _root(self, name: str) -> torch.Tensor | None:
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
                self._metrics[name],
                self.sensitivities.get(name),
            )
        return self._keys[key]


def _fit_part(job: tuple[FitLibrary, CandidateSet | int]) -> tuple[FitCache, CandidateSet]:
    """Fit a library's only layer, in a process of its own: these candidates, or at most so many a format.

    Returns:
        What was computed, and the fitted candidates.
    """
    part, site_or_limit = job
    (name,) = part.specs
    before = part.cache.of(name)
    site = (
        part.candidates(name, limit=site_or_limit)
        if isinstance(site_or_limit, int)
        else part.fitted(site_or_limit)
    )
    return part.cache.beyond(before), site
