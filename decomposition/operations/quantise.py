"""Quantise a layer: its weights become integers, or its activations and all of its arithmetic too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from decomposition.errors import DecompositionError, PlanError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.refit import PATCHES_TO_SOLVE, RefitProblem
from decomposition.fit.rounding import compensated_weight, equalise, make_up, round_features
from decomposition.formats.layers import FactorisedLayer, StagedLayer
from decomposition.network.layers import (
    FLOAT_BYTES,
    OPAQUE_KINDS,
    DecomposableModule,
    LayerSpec,
    is_decomposable_module,
    weight_of,
)
from decomposition.network.rounding import REDUCED_BITS, round_activations, round_weights
from decomposition.network.surgery import copied
from decomposition.operations.operation import Cost, FittedLayer, LayerOperation, register_operation

BITS = (8, REDUCED_BITS, 4)
INTEGERS, FLOATS, DYNAMIC = "uint8", "float32", "dynamic"
ACTIVATION_NOISE = 0.01
"""Approximate increase of a layer's relative output error by rounding one tensor to uint8: steps of a range
of ten root mean squares have a standard deviation of 10 / 255 / sqrt(12) root mean squares."""
_SCALE_BYTES = FLOAT_BYTES + 1
"""A scale in float32 and a zero point for each output channel of a weight."""
_SUFFIXES = {INTEGERS: "", FLOATS: " weights", DYNAMIC: " dynamic"}


@register_operation
@dataclass(frozen=True)
class Quantise(LayerOperation):
    """Round weights with one scale for each output channel, and activations with one range for each tensor.

    A factorised layer is quantised stage by stage.

    Attributes:
        weight_bits: Bits of the weights, 8 or 4; 7, stored in 8, in layers that compute in integers, for
            processors whose sums of 8-bit products overflow.
        activations: `uint8` where inputs and outputs are integers too, so that the layer computes in
            integers; `float32` where weights are stored in integers and computed with in float32; `dynamic`
            for an LSTM, which takes and gives floating point and rounds at every step, in ranges that it
            finds there, to multiply integers.
    """

    weight_bits: int = 8
    activations: str = INTEGERS

    kind: ClassVar[str] = "quantise"
    description: ClassVar[str] = "round weights, and activations too, to integers"
    stage: ClassVar[int] = 20

    def __str__(self) -> str:
        return f"int{self.weight_bits}{_SUFFIXES[self.activations]}"

    @property
    def integer(self) -> bool:
        return self.activations == INTEGERS

    @property
    def computes_integers(self) -> bool:
        return self.activations != FLOATS

    def check(self, spec: LayerSpec) -> None:
        if spec.refusal is not None:
            raise PlanError(f"layer {spec.name!r} cannot be quantised: {spec.refusal}")
        if self.weight_bits not in BITS:
            raise PlanError(
                f"layer {spec.name!r}: weights of {self.weight_bits} bits; choose from "
                f"{', '.join(map(str, BITS))}"
            )
        if self.activations not in _SUFFIXES:
            raise PlanError(
                f"layer {spec.name!r}: activations={self.activations!r}; choose {INTEGERS} or {FLOATS}"
            )
        if (self.activations == DYNAMIC) != (spec.kind in OPAQUE_KINDS):
            raise PlanError(
                f"layer {spec.name!r} is a {spec.kind}: activations={self.activations!r}; choose {DYNAMIC} "
                "for an LSTM, and for it alone"
            )
        if not self.computes_integers and self.weight_bits == REDUCED_BITS:
            raise PlanError(
                f"layer {spec.name!r}: weights of {REDUCED_BITS} bits are for layers that compute in "
                f"integers; take activations={INTEGERS!r}, or 8 bits"
            )
        if self.computes_integers and self.weight_bits not in (8, REDUCED_BITS):
            raise PlanError(
                f"layer {spec.name!r}: with {self.weight_bits}-bit weights nothing computes in integers; "
                "take activations='float32', or 8 bits"
            )

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        """Count integers instead of floats, with their scales; a bias stays in 4 bytes an element."""
        bias = spec.out_channels if spec.bias else 0
        bits = 4 if self.weight_bits == 4 else 8
        stored = math.ceil((before.params - bias) * bits / 8)
        weights = 2 if self.activations == DYNAMIC else 1  # one for the inputs, one for the state
        size = stored + FLOAT_BYTES * bias + weights * _SCALE_BYTES * before.rows
        return Cost(before.params, before.macs, size, rows=before.rows)

    def structure(self, module: nn.Module, spec: LayerSpec) -> nn.Module:
        """Return the layer with rounding added; a dense `module` is copied, any other is changed in place."""
        if is_decomposable_module(module):
            module = copied(module)
        stages = self._stages(module, spec)
        if isinstance(module, FactorisedLayer):
            module.rounds_between = self.integer
        for stage in stages:
            self.round(stage)
        return module

    def round(self, layer: nn.Module) -> None:
        """Add rounding of weights, and of activations, to a convolution, linear layer or list of cores."""
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        round_weights(layer, self.weight_bits, names)
        if self.integer:
            round_activations(layer)

    def _stages(self, module: nn.Module, spec: LayerSpec) -> list[nn.Module]:
        if isinstance(module, FactorisedLayer):
            stages = module.weight_holders()
            if not stages or (self.integer and not module.staged):
                reason, advice = "has no form in integers", ""
                if stages:
                    reason = "contracts its cores before it computes, so no stage of it can be integers"
                    advice = "its weights alone (activations='float32'), or "
                ranks = list(module.ranks)
                raise DecompositionError(
                    f"layer {spec.name!r}: {module.tensor_format.name} of ranks {ranks} {reason}; quantise "
                    f"{advice}the dense layer"
                )
            return stages
        stages = [part for part in module.modules() if is_decomposable_module(part)]
        if not stages:
            raise DecompositionError(
                f"layer {spec.name!r} is a {type(module).__name__} without weights to round"
            )
        return stages

    def fit(
        self,
        module: nn.Module,
        spec: LayerSpec,
        problem: RefitProblem,
        *,
        sensitivity: torch.Tensor | None,
        options: FitOptions,
    ) -> FittedLayer:
        """Round the layer's weights stage by stage; other weights compensate for each rounding error."""
        if is_decomposable_module(module):
            dense = copied(module)
            solved = problem.count >= PATCHES_TO_SOLVE * problem.target[0].numel()
            target = (problem.target if solved else weight_of(module)).flatten(1)
            with torch.no_grad():
                rounded = compensated_weight(target, problem.metric, self.weight_bits)
                dense.weight.copy_(rounded.reshape(dense.weight.shape))
            layer = self.structure(dense, spec)
            weight = weight_of(cast(DecomposableModule, layer))
        else:
            if self.integer:
                for part in module.modules():
                    if isinstance(part, StagedLayer):
                        equalise(part, problem.metric)
            layer, weight = self.structure(module, spec), problem.target
            for part in layer.modules():
                if isinstance(part, FactorisedLayer):
                    round_features(part, problem.metric, self.weight_bits)
                    make_up(part, problem, self.weight_bits)
                    weight = weight_of(part.to_dense())
        return FittedLayer(layer, weight)

    def values(self) -> dict[str, Any]:
        return {"weight_bits": self.weight_bits, "activations": self.activations}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        bits, activations = values.get("weight_bits", 8), values.get("activations", INTEGERS)
        if type(bits) is not int or bits not in BITS:
            raise PlanError(f"{where}: weight_bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
        if not isinstance(activations, str) or activations not in _SUFFIXES:
            raise PlanError(
                f"{where}: activations must be one of {', '.join(_SUFFIXES)}, got {activations!r}"
            )
        return cls(bits, activations)


PRECISIONS: dict[str, tuple[Quantise, ...]] = {
    "float32": (),
    "int8": (Quantise(),),
    "int7": (Quantise(REDUCED_BITS),),
    "int8_weights": (Quantise(8, activations=FLOATS),),
    "int4_weights": (Quantise(4, activations=FLOATS),),
}
"""Precisions that a layer may compute or be stored in, by the name of the option."""


def computes_in_integers(precisions: Iterable[str]) -> bool:
    """Tell whether any of these precisions computes in integers; unknown names do not count."""
    return any(operation.integer for name in precisions for operation in PRECISIONS.get(name, ()))
