"""Fit candidates of all layers, in processes side by side, and keep the fits."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from decomposition.cache import Cache, digest
from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches
from decomposition.calibration.metric import (
    Metric,
    Selection,
    floored,
    is_finite,
    powers,
    products,
    select_inputs,
    symmetric_root,
)
from decomposition.calibration.moments import (
    UNREACHED,
    InputMoments,
    collect_moments,
    collect_sensitivities,
    fit_sizes,
    settled,
    warn_unreached,
)
from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.choose.listing import CandidateLister, changing_layers, count_norm_parameters, within
from decomposition.choose.processes import Spread, in_processes
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import CHOOSING, FitOptions
from decomposition.fit.fitting import Fit, Fitter
from decomposition.fit.refit import RefitProblem
from decomposition.fit.rounding import amplification
from decomposition.formats import TensorFormat
from decomposition.formats.layers import FactorisedLayer
from decomposition.memory import release_memory, within_room, without_room
from decomposition.network.geometry import Geometry, WeightModes
from decomposition.network.inputs import ExampleInputs, count_inputs
from decomposition.network.layers import DecomposableModule, LayerSpec, weight_of
from decomposition.network.rounding import REDUCED_BITS
from decomposition.network.surgery import unwrapped
from decomposition.operations import (
    ACTIVATION_NOISE,
    ChannelFactors,
    Factorise,
    LayerOperation,
    Operation,
    Quantise,
)
from decomposition.public_calls import public_call


@dataclass
class FitCache:
    """Fits, input selections and rounded cores of a network's layers, in memory."""

    fits: dict[tuple[str, Factorise], Fit] = field(default_factory=dict)
    selections: dict[tuple[str, int], Selection] = field(default_factory=dict)
    rounded: dict[tuple[str, tuple[Operation, ...], int | None], tuple[torch.Tensor, ...]] = field(
        default_factory=dict
    )

    def _chosen(self, keep: Callable[[str, Any], bool]) -> FitCache:
        """Return the entries of the kinds and keys that `keep` accepts."""
        parts = {
            kind: {key: value for key, value in entries.items() if keep(kind, key)}
            for kind, entries in vars(self).items()
        }
        return FitCache(**parts)

    def of(self, name: str) -> FitCache:
        """Return the entries of one layer."""
        return self._chosen(lambda _, key: key[0] == name)

    def beyond(self, other: FitCache) -> FitCache:
        """Return the entries that `other` lacks."""
        return self._chosen(lambda kind, key: key not in getattr(other, kind))

    def update(self, other: FitCache) -> None:
        """Add the entries of `other`."""
        for kind, entries in vars(self).items():
            entries.update(getattr(other, kind))


_FITS_IN_MEMORY = 2**29
"""Bytes of the fits of all candidates that are kept in memory; those of small networks take less."""


def _fit_bytes(fit: Fit) -> int:
    return sum(core.nbytes for core in fit.cores)


# Part of the keys of fits on disk: raised whenever a change of the code changes the cores.
_VERSION = 5


def largest_first(specs: Mapping[str, LayerSpec]) -> list[str]:
    """Sort layers by work, largest first: processes that share them then finish soonest."""

    def work(name: str) -> int:
        spec = specs[name]
        columns = math.prod(spec.weight_shape[1:])
        return spec.out_channels * columns**2 * (1 if spec.kernel_elements == 1 else 100)

    return sorted(specs, key=work, reverse=True)


def fit_side_by_side(
    library: FitLibrary,
    jobs: Iterable[tuple[str, CandidateSet | int]],
    workers: int | Spread[Any, Any],
    finish: Callable[[CandidateSet], None],
) -> None:
    """Fit layers in processes, each with the part of the library that holds one layer."""
    parts = ((library.part(name), site_or_limit) for name, site_or_limit in jobs)
    results: Iterator[tuple[FitCache, CandidateSet]]
    if callable(workers):
        results = workers(_fit_part, parts, "fits")
    else:
        results = in_processes(_fit_part, parts, workers, "fits")
    for computed, site in results:
        library.cache.update(computed)
        library.make_room()
        finish(site)


def _fit_part(job: tuple[FitLibrary, CandidateSet | int]) -> tuple[FitCache, CandidateSet]:
    """Fit a library's only layer in a worker: given candidates, or a limit of them per format."""
    part, site_or_limit = job
    (name,) = part.specs
    before = part.cache.of(name)
    site = (
        part.candidates(name, limit=site_or_limit)
        if isinstance(site_or_limit, int)
        else part.fitted(site_or_limit)
    )
    return part.cache.beyond(before), site


class FitLibrary:
    """Fits of one model's layers in one format or several, each computed once.

    Weights are held twice, in float32 by the model and in float64 here, where fits compute with them. The
    moments, the largest part, are held once where they are `settled`, or else twice: as they were measured,
    and shrunk.

    Args:
        model: The dense model; its weights are copied.
        specs: The compressible layers.
        formats: Name of the format, or names of several that every layer may choose from.
        moments: Moments by layer name (`collect_moments`); `None` fits to the weights.
        sensitivities: Sensitivities by layer name (`collect_sensitivities`), which weigh output channels
            within a layer and, with moments, layers against each other; layers without one count evenly.
        centred: Measure errors around the mean output, for evaluators that correct the mean (a bias or the
            batch norm behind the layer); meaningless without moments.
        options: How much work each fit may do.
        folder: Where fits are kept on disk for the next run with the same weights, moments and options;
            `None` keeps them in memory only.
        **listing: What else there is to choose from; the options of `CandidateLister`.

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
        centred: bool = True,
        options: FitOptions = CHOOSING,
        folder: Path | None = None,
        **listing: Any,
    ) -> None:
        norms = count_norm_parameters(model, specs)
        self.lister = CandidateLister(specs, formats, norm_parameters=norms, **listing)
        self.specs = self.lister.specs
        self.options = options
        self.moments = moments
        self.sensitivities = dict(sensitivities or {})
        modules = dict(model.named_modules())
        self.weights = {name: weight_of(modules[name]) for name in self.specs}
        self._geometries = {name: Geometry.of(modules[name]) for name in self.specs}
        self._metrics: dict[str, Metric | None] = dict.fromkeys(self.specs)
        if moments is not None:
            idle = self.lister.dense  # layers without moments
            moments |= {name: InputMoments.even(self.weights[name][0].numel()) for name in idle}
            missing = sorted(set(self.specs) - set(moments))
            if missing:
                raise DecompositionError(
                    f"no input moments for layers {', '.join(missing)}; collect them first"
                )
            self._metrics = {name: moments[name].metric(centred=centred) for name in self.specs}
        self.cache = FitCache()
        self._rounding_losses: dict[tuple[str, Quantise], float] = {}
        self._disk = Cache(folder)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
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
    @public_call()
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
        batches = None
        if calibration is not None:
            batches = checked_batches(calibration, model, [spec.name for spec in specs])
        inputs = sum(map(count_inputs, batches or []))
        dense = without_room({spec.name: fit_sizes(spec, inputs) for spec in specs})
        fitted = [spec for spec in specs if spec.name not in dense]
        if batches is not None:
            unreached: list[str] = []
            moments = settled(collect_moments(model, fitted, batches, seed=seed, unreached=unreached))
            warn_unreached(unreached)
            dense |= dict.fromkeys(unreached, UNREACHED)
            options["moments"] = moments
            if weigh_outputs and fitted:
                options["sensitivities"] = collect_sensitivities(model, fitted, batches, seed=seed)
        options["dense"] = dense
        return cls(model, specs, formats, **options)

    @public_call()
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

    def make_room(self) -> None:
        """Move the oldest fits out of memory where all are large; they are read from disk when needed."""
        held = sum(map(_fit_bytes, self.cache.fits.values()))
        most = within_room(_FITS_IN_MEMORY, "fits")
        if held > most:
            self._move_to_disk(held, most // 2)
        release_memory()

    def _move_to_disk(self, held: int, wanted: int) -> None:
        fits = self.cache.fits
        if self._disk.folder is None:
            self._scratch = tempfile.TemporaryDirectory()
            self._disk = Cache(Path(self._scratch.name))
        for key in list(fits):
            if held <= wanted:
                break
            fit = fits.pop(key)
            self._kept(*key, fit)
            held -= _fit_bytes(fit)

    def _kept(self, name: str, operation: Factorise, known: Fit | None = None) -> Fit:
        """Return the fit of a layer, from disk or computed; put one that is known on disk."""

        def compute() -> dict[str, torch.Tensor]:
            fit = self._compute(name, operation) if known is None else known
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
                    self._metrics[name],
                    self.sensitivities.get(name),
                    like=self._fitter[1] if self._fitter is not None and self._fitter[0][0] == name else None,
                )
                self._fitter = (key, fitter)  # frees the last fitter before this one allocates
            return self._fitter[1].fit(operation.ranks, self.options)
        except DecompositionError as error:
            raise DecompositionError(f"layer {name!r}: {error}") from error

    def _key(self, name: str, operation: Factorise) -> str:
        """Hash everything but the ranks that a fit of this layer depends on."""
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

    def lost(self, name: str, weight: torch.Tensor) -> float:
        """Return the squared relative output error of a layer with this weight."""
        rows = self.weights[name].flatten(1)
        whole = self._power(name, rows)
        return max(0.0, self._power(name, rows - weight.flatten(1))) / whole if whole > 0 else 0.0

    def _power(self, name: str, rows: torch.Tensor) -> float:
        """Return tr(G V S V') of a change V (out, columns) of a layer's weight: its effect on the output."""
        metric, sensitivity = self._metrics[name], self.sensitivities.get(name)
        if sensitivity is None:
            return float(powers(rows, metric).sum())
        return float((floored(sensitivity) * products(rows, metric)).sum())

    def _importance(self, name: str) -> float:
        """Return E[y' G y] of a layer's output y, which makes layers' errors comparable; 1 if unknown."""
        if self._metrics[name] is None or name not in self.sensitivities:
            return 1.0
        return self._power(name, self.weights[name].flatten(1))

    def selection(self, name: str, count: int) -> Selection:
        """Return the selection of `count` input channels of a layer that has a narrowing."""
        selections = self.cache.selections
        if (name, count) not in selections:
            arguments = self.weights[name], self._metrics[name], self.sensitivities.get(name)
            by_count = select_inputs(*arguments, self.lister.narrowings[name].counts)
            selections.update({(name, number): selection for number, selection in by_count.items()})
        return selections[name, count]

    @public_call()
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

    @public_call()
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
            # In float32 to save memory: there is one for every candidate in integers.
            rounded[key] = tuple(core.detach().clone() for core in cores)
        return tuple(core.double() for core in rounded[key])

    def cached(self, sites: Iterable[CandidateSet]) -> FitCache:
        """Return the cache entries of these sites' candidates, computing those that are missing."""
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
        """Return the amplification of squared rounding noise from between the stages to the output."""
        modes = operation.modes(self.specs[name])
        cores = self.fit(name, operation).cores
        tensors = 1 if modes.kernel == 1 else 2
        return tensors * amplification(operation.tensor_format, cores, modes, self._metrics[name]) ** 2

    def _rounding_loss(self, name: str, operation: Quantise) -> float:
        """Compute what rounding the dense weight loses, once for each layer and rounding."""
        key = (name, operation)
        if key not in self._rounding_losses:
            self._rounding_losses[key] = self.lost(name, self.weight(name, [operation]))
        return self._rounding_losses[key]

    def _error(self, name: str, candidate: Candidate) -> float:
        """Return a candidate's relative output error; rounded activations count as an estimated constant."""
        operations, reads = candidate.operations, candidate.reads
        if candidate.removed is not None:
            # Removing a block loses its whole summand: its last layer bears the error, the others none.
            return 1.0 if self.lister.removals[name].last else 0.0
        factors = [operation for operation in operations if isinstance(operation, Factorise)]
        rounding = [operation for operation in operations if isinstance(operation, Quantise)]
        noise = ACTIVATION_NOISE**2 if candidate.computes_integers else 0.0
        if rounding and (not factors or reads is not None or rounding[0].weight_bits < REDUCED_BITS):
            squared = self.lost(name, self.weight(name, operations, reads))
        elif reads is not None:
            squared = self.selection(name, len(reads)).error ** 2
        else:
            squared = sum(self.fit(name, operation).error ** 2 for operation in factors)
            if rounding:  # stages in 8 bits lose about as much as the whole weight, and cost more to round
                noise += self._rounding_loss(name, rounding[0])
        if noise:
            squared += noise * (1 + sum(self._noise(name, operation) for operation in factors))
        return squared**0.5

    @public_call()
    def candidates(self, name: str, *, limit: int = 16) -> CandidateSet:
        """Fit the candidates of a layer, `limit` a format at most, and return them, the dense layer last."""
        return self.fitted(self.unfitted(name, limit=limit))

    @public_call()
    def all_candidates(
        self, *, limit: int = 16, progress: Callable[[str], None] | None = None, workers: int | None = None
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
            fit_side_by_side(self, ((name, limit) for name in largest_first(self.specs)), workers, finish)
        return [sites[name] for name in self.specs]

    def part(self, name: str) -> FitLibrary:
        """Return a library of one layer, which shares everything with this one except future fits."""
        part = copy.copy(self)
        part.specs, part.weights = {name: self.specs[name]}, {name: self.weights[name]}
        part.moments, part._metrics = None, {name: self._metrics[name]}
        part.sensitivities = {key: held for key, held in self.sensitivities.items() if key == name}
        part._fitter, part._scratch = None, None
        part._geometries = {name: self._geometries[name]}
        part.cache = self.cache.of(name)
        return part

    @public_call()
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
                self.make_room()
            self._fitter = None  # what a layer's fits share is large
        else:
            sites = {site.name: site for site in unfitted}
            jobs = ((name, sites[name]) for name in largest_first(self.specs) if name in sites)
            fit_side_by_side(self, jobs, workers, finish)

    @public_call()
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
            unfitted, candidates=(*fitted, unfitted.candidates[-1]), importance=self._importance(name)
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
        if not is_finite(weight):
            raise DecompositionError(
                f"layer {name!r}: the weight holds NaN or infinite values; repair the checkpoint first"
            )
        root, sensitivity = None, self.sensitivities.get(name)
        own_ranks = spec.kernel_elements > 1 and any(each.own_ranks for each in self.formats)
        if own_ranks and sensitivity is not None:
            root = symmetric_root(sensitivity)

        def spectra(tensor_format: TensorFormat) -> Sequence[np.ndarray]:
            modes = self.modes(name, tensor_format)
            return tensor_format.spectra(weight, modes, self._metrics[name], root)

        return self.lister.candidates(name, limit=limit, spectra=spectra)
