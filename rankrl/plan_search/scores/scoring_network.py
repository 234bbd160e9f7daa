"""Write plans' reconstructed weights into one static dense network, so that no plan rebuilds modules."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from decomposition.calibration.moments import BatchNorm
from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.choose.library import FitLibrary
from decomposition.choose.quick_refit import QuickRefit
from decomposition.network.inputs import Inputs, mapped, rows, run_model, tensors_in
from decomposition.network.layers import DecomposableModule, is_decomposable_module
from decomposition.network.surgery import copied
from rankrl.device import Precision, deterministic_kernels, in_layout, to_fastest_layout
from rankrl.errors import ConfigError

CACHE_BYTES = 512 * 2**20
"""Reconstructed weights kept in memory; the least recently used ones are dropped beyond it."""

# Folding reorders float32 sums, which changes the sixth digit; folding a wrong batch norm changes the first.
_FOLDING_TOLERANCE = 1e-3

_PLAIN_NORMS = get_args(BatchNorm)


@dataclass
class _ScoredLayer:
    """A compressible layer and the batch norm after it, if any; its running mean corrects the output's."""

    module: DecomposableModule
    norm: BatchNorm | None
    scale: Tensor | None = None

    @property
    def shift(self) -> Tensor | None:
        """The tensor that shifts the mean of the layer's output, if there is one."""
        return self.module.bias if self.norm is None else self.norm.running_mean


@dataclass(frozen=True)
class _Weight:
    """A layer's weight in compute precision, with its bias or batch norm's running mean."""

    weight: Tensor
    shift: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.shift is None else self.shift.nbytes)


class ScoringNetwork:
    """A copy of the dense network into which the weights of any plan can be written.

    The approximation V of a weight W changes the layer's mean output by (W - V) E[x]; its bias, or the
    running mean behind it, compensates for that where there is one. Batch norms are folded into the layers
    before them where the folded network gives the same class scores.

    Shapes: example (N, C, H, W).
    """

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        sites: Sequence[CandidateSet],
        precision: Precision,
        example: Inputs,
    ) -> None:
        self.library = library
        self.sites = tuple(sites)
        self.precision = precision
        self._cache: OrderedDict[tuple[int, int], _Weight] = OrderedDict()
        self._cached = 0
        self.model, self._layers = self._copy(model)
        example = mapped(lambda x: x.to(self.precision.device), example)
        self.layout = to_fastest_layout(self.model, rows(example, slice(2)))
        self.folded = self._fold(model, example)
        self._dense = {name: self._keep(layer) for name, layer in self._layers.items()}
        self._written = [site.dense for site in self.sites]

    def write(self, choices: Sequence[int]) -> None:
        """Write the weights of a plan; layers that have them already are skipped."""
        for index, (site, choice) in enumerate(zip(self.sites, choices, strict=True)):
            if self._written[index] == choice:
                continue
            layer = self._layers[site.name]
            entry = self._dense[site.name] if choice == site.dense else self._reconstructed(index, choice)
            with torch.no_grad():
                layer.module.weight.copy_(entry.weight)
                if layer.shift is not None and entry.shift is not None:
                    layer.shift.copy_(entry.shift)
            self._written[index] = choice

    def logits(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the class scores of batches, concatenated, (N, classes) float32."""
        return class_scores(self.model, batches, self.precision, self.layout)

    def _copy(self, model: nn.Module) -> tuple[nn.Module, dict[str, _ScoredLayer]]:
        network = copied(model).to(self.precision.device).eval().requires_grad_(False)
        modules = dict(network.named_modules())
        serves = Counter(spec.batch_norm for spec in self.library.specs.values())
        layers = {}
        for name, spec in self.library.specs.items():
            module = modules[name]
            norm = modules[spec.batch_norm] if spec.batch_norm and serves[spec.batch_norm] == 1 else None
            if not isinstance(norm, BatchNorm) or norm.running_mean is None:
                norm = None
            if not is_decomposable_module(module):
                raise TypeError(
                    f"layer {name!r} is a {type(module).__name__}; the library fits another model"
                )
            layers[name] = _ScoredLayer(module, norm)
        return network, layers

    def _fold(self, model: nn.Module, example: Inputs) -> bool:
        """Fold every batch norm into its layer, unless that changes the network's outputs."""
        if all(layer.norm is None for layer in self._layers.values()):
            return False
        network, layers = self._copy(model)
        for name, layer in layers.items():
            batch_norm = self.library.specs[name].batch_norm
            if type(layer.norm) not in _PLAIN_NORMS or layer.norm is None or batch_norm is None:
                continue  # a subclass of batch norm may do more than normalise
            layer.scale, shift = _affine(layer.norm)
            module = layer.module
            module.weight.mul_(layer.scale.view(-1, *[1] * (module.weight.ndim - 1)))
            bias = shift if module.bias is None else module.bias * layer.scale + shift
            module.bias = nn.Parameter(bias, requires_grad=False)
            layer.norm = None
            parent, _, child = batch_norm.rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity())
        network.to(memory_format=self.layout)
        with torch.inference_mode():
            before, after = run_model(self.model, example), run_model(network, example)
        if not _equal(before, after):
            return False
        self.model, self._layers = network, layers
        return True

    def _keep(self, layer: _ScoredLayer) -> _Weight:
        """Convert a layer's weight to compute precision and return the dense one."""
        weight = layer.module.weight.detach()
        if self.precision.dtype == torch.bfloat16:  # once, where autocast would convert in every pass
            weight = weight.to(torch.bfloat16)
        shift = None if layer.shift is None else layer.shift.detach().clone()
        layer.module.weight = nn.Parameter(weight.clone(), requires_grad=False)
        return _Weight(weight, shift)

    def _reconstructed(self, site: int, choice: int) -> _Weight:
        key = (site, choice)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        entry = self._cache[key] = self._reconstruct(
            self.sites[site].name, self.sites[site].candidates[choice]
        )
        self._cached += entry.nbytes
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return entry

    def _reconstruct(self, name: str, candidate: Candidate) -> _Weight:
        layer, dense = self._layers[name], self._dense[name]
        weight, shift = self.library.weight(name, candidate.operations, candidate.reads), dense.shift
        scale = None if layer.scale is None else layer.scale.double().cpu()
        if self.library.moments is not None and shift is not None:
            lost = (self.library.weights[name] - weight).flatten(1) @ self.library.moments[name].mean
            lost = -lost if layer.norm is not None else lost if scale is None else lost * scale
            shift = (shift.double() + lost.to(shift.device)).to(shift.dtype)
        if scale is not None:
            weight = weight * scale[:, None, None]
        written = torch.empty_like(dense.weight).copy_(weight.reshape(dense.weight.shape))
        return _Weight(written, shift)


def class_scores(
    model: nn.Module, batches: Sequence[Tensor], precision: Precision, layout: torch.memory_format
) -> Tensor:
    """Return a network's class scores of batches (n, C, H, W), concatenated, (N, classes) float32."""
    with torch.inference_mode(), precision.autocast(), deterministic_kernels():
        parts = [run_model(model, in_layout(batch, layout)) for batch in batches]
        return torch.cat([scores.float() for scores in parts])


def _equal(before: object, after: object) -> bool:
    """Whether two outputs of a network, tensors or nestings of them, are equal up to rounding."""
    pairs = zip(tensors_in(before), tensors_in(after), strict=True)
    return all(torch.allclose(x, y, rtol=_FOLDING_TOLERANCE, atol=_FOLDING_TOLERANCE) for x, y in pairs)


def _affine(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Return scale and shift, y = scale * x + shift, of a batch norm in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise TypeError("a batch norm without running statistics is no affine map")
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


class RefittingNetwork:
    """A copy of the dense network whose layers are refitted under every plan (`choose.quick_refit`)."""

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        sites: Sequence[CandidateSet],
        precision: Precision,
        calibration: Tensor,
    ) -> None:
        for site in sites:
            if any(one.reads is not None or one.removed is not None for one in site.candidates):
                raise ConfigError(
                    "search.statistics=refitted scores plans of ranks and roundings, and layer "
                    f"{site.name!r} may lose channels or leave; set search.statistics=corrected, or "
                    "decomposition.channels=[] and decomposition.blocks=false"
                )
        self.sites, self.precision = tuple(sites), precision
        self.model = copied(model).to(precision.device).eval().requires_grad_(False)
        images = calibration.to(precision.device)
        self.layout = to_fastest_layout(self.model, images[:2])
        with precision.autocast(), deterministic_kernels():
            self._refit = QuickRefit(self.model, library, in_layout(images, self.layout))

    def write(self, choices: Sequence[int]) -> None:
        pairs = zip(self.sites, choices, strict=True)
        operations = {site.name: site.candidates[choice].operations for site, choice in pairs}
        with self.precision.autocast(), deterministic_kernels():
            self._refit.take(operations)

    def logits(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the class scores of batches, concatenated, (N, classes) float32."""
        return class_scores(self.model, batches, self.precision, self.layout)
