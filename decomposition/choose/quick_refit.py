"""Refit a network to many plans in turn, each in a fraction of the time of a full sequential refit.

`decomposition.fit` fits every layer of one plan to the inputs that reach it. Many plans of one network
have much in common: the dense layers' outputs on the calibration inputs, how far moments are shrunk, and each
layer's cores, which were fitted when its candidates were. So the dense network runs once, each plan takes one
forward pass of its own, and every layer begins with its candidate's cores: the output factor is solved for in
closed form, the others follow in a few iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decomposition.calibration.metric import labels_or_single, mean_of, most_rows, shrinkage
from decomposition.calibration.moments import tracked_batch_norms
from decomposition.choose.library import FitLibrary
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.refit import (
    PATCHES_TO_SOLVE,
    RefitProblem,
    absorbs_mean,
    moments_of,
    target_and_metric,
)
from decomposition.network.cost import watching
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
from decomposition.network.inputs import Inputs, count_inputs, run_model
from decomposition.network.layers import BatchNorm, DecomposableModule, is_decomposable_module, weight_of
from decomposition.network.surgery import copied
from decomposition.operations import Factorise, FittedLayer, LayerOperation, Operation

QUICK = FitOptions(iterations=10, tolerance=1e-4, patience=5)
MAX_PATCHES = 8_192
"""Patches that a layer is fitted on at most; so many outputs of every layer are kept."""


@dataclass(frozen=True)
class _Dense:
    """A dense layer with its outputs on the calibration patches, their mean, and the shrinkage."""

    layer: DecomposableModule
    weight: torch.Tensor
    outputs: torch.Tensor
    outputs_mean: torch.Tensor
    share: float


class QuickRefit:
    """Applies one plan after the other to a dense network, every layer fitted to the inputs that reach it."""

    def __init__(
        self, network: nn.Module, library: FitLibrary, inputs: Inputs, *, options: FitOptions = QUICK
    ) -> None:
        if count_inputs(inputs) == 0:
            raise DecompositionError("a network cannot be refitted to no inputs; pass some")
        self.network, self._library, self._inputs = network, library, inputs
        self._options = options
        self._modules = dict(network.named_modules())
        self._dense: dict[str, _Dense] = {}
        self._norms = tracked_batch_norms(network)
        self._means = [_running_mean(norm).clone() for norm in self._norms]
        self._arrived: list[torch.Tensor | None] = [None] * len(self._norms)
        self._seeds = {name: place for place, name in enumerate(library.specs)}
        self._pass(self._observe, self._remember_mean)

    def take(self, operations: Mapping[str, Sequence[Operation]]) -> None:
        for name, layer_operations in operations.items():
            strange = [
                operation.kind
                for operation in layer_operations
                if not isinstance(operation, LayerOperation) or operation.removes
            ]
            if strange:
                raise DecompositionError(
                    f"layer {name!r}: {strange[0]!r} cannot be refitted quickly, which is for plans of ranks "
                    "and roundings; apply the plan instead"
                )
        done: set[str] = set()
        changed = False

        def fit(name: str, x: torch.Tensor) -> None:
            nonlocal changed
            if name in self._dense and name not in done:  # of several calls of a layer, the first is fitted
                done.add(name)
                changed = changed or bool(operations.get(name))
                if changed:
                    self._fit(name, operations.get(name, ()), x)
                else:
                    self._restore(name)

        self._pass(fit, self._shift_mean)

    def _pass(
        self, at_layer: Callable[[str, torch.Tensor], None], at_norm: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Run the network on the calibration inputs with a function before each layer and batch norm."""

        def before(act: Callable[[Any, torch.Tensor], None], what: str | int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                # Layers may compute in half precision; sums of second moments must not.
                with torch.autocast(args[0].device.type, enabled=False):
                    if args[0].numel():
                        act(what, args[0])

            return hook

        hooks = [
            self._modules[name].register_forward_pre_hook(before(at_layer, name)) for name in self._seeds
        ]
        hooks += [
            norm.register_forward_pre_hook(before(at_norm, place)) for place, norm in enumerate(self._norms)
        ]
        with watching(self.network, hooks):
            run_model(self.network, self._inputs)

    def _patches(
        self, name: str, layer: DecomposableModule, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample patches of a layer's input, always at the same positions, with the input of each."""
        generator = torch.Generator().manual_seed(self._seeds[name])
        most = most_rows(layer.weight[0].numel(), MAX_PATCHES)
        (patches,), labels = sample_labelled_patches(layer, [x], most, generator)
        inputs = count_inputs(self._inputs)
        return patches.float(), labels_or_single(labels_of_batch(labels, len(x), inputs), inputs)

    def _observe(self, name: str, x: torch.Tensor) -> None:
        """Record a dense layer's outputs and shrinkage."""
        layer = self._modules[name]
        if name in self._dense or not is_decomposable_module(layer):
            return
        patches, labels = self._patches(name, layer, x)
        weight, mean = weight_of(layer).flatten(1), mean_of(patches)
        centre = mean.to(patches)
        share = shrinkage(patches, labels, moments_of(patches, mean), centre)
        outputs = patches @ weight.T.to(patches)
        self._dense[name] = _Dense(copied(layer), weight, outputs, weight @ mean, share)

    def _fit(self, name: str, operations: Sequence[Operation], x: torch.Tensor) -> None:
        """Fit a layer to the inputs that arrive, under its operations."""
        dense, spec, layer = self._dense[name], self._library.specs[name], self._modules[name]
        patches, _ = self._patches(name, dense.layer, x)
        mean = mean_of(patches)
        matrix, metric = target_and_metric(
            dense.weight,
            dense.outputs,
            patches,
            moments_of(patches, mean),
            dense.outputs_mean,
            mean,
            dense.share,
            centred=absorbs_mean(spec, correct_batch_norm=True),
        )
        target = matrix.reshape(weight_of(dense.layer).shape)
        weight = target if len(patches) >= PATCHES_TO_SOLVE * matrix.shape[1] else weight_of(dense.layer)
        fitted = FittedLayer(dense.layer, weight)
        for operation in operations:
            assert isinstance(operation, LayerOperation)
            start = self._library.fit(name, operation).cores if isinstance(operation, Factorise) else None
            problem = RefitProblem(target, metric, len(patches), start)
            sensitivity = self._library.sensitivities.get(name)
            fitted = operation.fit(
                fitted.module, spec, problem, sensitivity=sensitivity, options=self._options
            )
        written: nn.Parameter = layer.weight
        written.copy_(fitted.weight.reshape(written.shape))
        bias: torch.Tensor | None = getattr(layer, "bias", None)
        if bias is not None and dense.layer.bias is not None:
            shift = dense.outputs_mean - fitted.weight.flatten(1) @ mean
            bias.copy_(dense.layer.bias + shift.to(bias))

    def _restore(self, name: str) -> None:
        """Restore the dense weight of a layer whose inputs are unchanged."""
        dense, layer = self._dense[name].layer, self._modules[name]
        layer.load_state_dict(dense.state_dict())

    def _remember_mean(self, place: int, x: torch.Tensor) -> None:
        if self._arrived[place] is None:
            self._arrived[place] = _mean(x)

    def _shift_mean(self, place: int, x: torch.Tensor) -> None:
        before = self._arrived[place]
        if before is not None:
            _running_mean(self._norms[place]).copy_(self._means[place] + _mean(x) - before)


def _running_mean(norm: BatchNorm) -> torch.Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.float().mean([axis for axis in range(x.ndim) if axis != 1])
