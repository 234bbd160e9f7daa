"""Quantise a layer: its weights become integers, and with its activations all that it computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from decomposition.calibration.metric import Metric, RowFactor, channel_moments, powers, times
from decomposition.calibration.metric import columns as metric_columns
from decomposition.errors import DecompositionError, PlanError
from decomposition.fit.compensated_rounding import compensated_weight
from decomposition.fit.fitting import FitOptions
from decomposition.fit.lockstep import PATCHES_TO_SOLVE, RefitProblem
from decomposition.formats import Cores, TensorFormat
from decomposition.formats.factorised import ContractedLayer, FactorisedLayer, StagedLayer
from decomposition.network.layers import DecomposableModule, LayerSpec, is_decomposable_module, weight_of
from decomposition.network.modes import WeightModes
from decomposition.network.rounding import REDUCED_BITS, round_activations, round_weights, rounded_weight
from decomposition.network.surgery import copied
from decomposition.operations.base import (
    FLOAT_BYTES,
    Cost,
    FittedLayer,
    LayerOperation,
    register_operation,
)

BITS = (8, REDUCED_BITS, 4)
INTEGERS, FLOATS = "uint8", "float32"
ACTIVATION_NOISE = 0.01
"""What rounding one tensor to uint8 adds to a layer's relative output error, about: the steps of a range of
ten root mean squares have a standard deviation of 10 / 255 / sqrt(12) of them."""
_SCALE_BYTES = FLOAT_BYTES + 1
"""A scale in float32 and a zero point for each output channel of a weight."""
_RIDGE = 1e-6
_SMALLEST_POWER = 1e-6


@register_operation
@dataclass(frozen=True)
class Quantise(LayerOperation):
    """Round weights, one scale an output channel, and activations, one range a tensor.

    A factorised layer is quantised stage by stage.

    Attributes:
        weight_bits: Bits of the weights, 8 or 4; 7, stored in 8, in layers that compute in integers, for
            processors whose sums of 8-bit products overflow.
        activations: `uint8` where inputs and outputs are integers too, so that the layer computes in
            integers; `float32` where weights are stored in integers and computed with in float32.
    """

    weight_bits: int = 8
    activations: str = INTEGERS

    kind: ClassVar[str] = "quantise"
    description: ClassVar[str] = "round weights, and activations too, to integers"
    stage: ClassVar[int] = 20

    def __str__(self) -> str:
        return f"int{self.weight_bits}" + ("" if self.integer else " weights")

    @property
    def integer(self) -> bool:
        """Whether the layer takes and gives integers."""
        return self.activations == INTEGERS

    def check(self, spec: LayerSpec) -> None:
        """Refuse a layer that cannot be replaced, and bits that no runtime computes with.

        Raises:
            PlanError: Naming the layer, the value and what is allowed.
        """
        if spec.refusal is not None:
            raise PlanError(f"layer {spec.name!r} cannot be quantised: {spec.refusal}")
        if self.weight_bits not in BITS:
            raise PlanError(
                f"layer {spec.name!r}: weights of {self.weight_bits} bits; choose from "
                f"{', '.join(map(str, BITS))}"
            )
        if self.activations not in (INTEGERS, FLOATS):
            raise PlanError(
                f"layer {spec.name!r}: activations={self.activations!r}; choose {INTEGERS} or {FLOATS}"
            )
        if not self.integer and self.weight_bits == REDUCED_BITS:
            raise PlanError(
                f"layer {spec.name!r}: weights of {REDUCED_BITS} bits are for layers that compute in "
                f"integers; take activations={INTEGERS!r}, or 8 bits"
            )
        if self.integer and self.weight_bits not in (8, REDUCED_BITS):
            raise PlanError(
                f"layer {spec.name!r}: with {self.weight_bits}-bit weights nothing computes in integers; "
                "take activations='float32', or 8 bits"
            )

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        """Count integers instead of floats, with their scales; a bias stays in 4 bytes an element."""
        bias = spec.out_channels if spec.bias else 0
        bits = 4 if self.weight_bits == 4 else 8
        stored = math.ceil((before.params - bias) * bits / 8)
        size = stored + FLOAT_BYTES * bias + _SCALE_BYTES * before.rows
        return Cost(before.params, before.macs, size, rows=before.rows)

    def structure(self, module: nn.Module, spec: LayerSpec) -> nn.Module:
        """Return the layer with its rounding in place; `module` itself, changed, unless it is dense.

        Raises:
            DecompositionError: If its cores are contracted while it runs, so that it has no stages which
                could compute in integers.
        """
        if is_decomposable_module(module):
            module = copied(module)
        stages = self._stages(module, spec)
        if isinstance(module, FactorisedLayer):
            module.rounds_between = self.integer
        for stage in stages:
            self.round(stage)
        return module

    def round(self, layer: nn.Module) -> None:
        """Let a convolution, linear layer or list of cores round its weights, and its activations."""
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        round_weights(layer, self.weight_bits, names)
        if self.integer:
            round_activations(layer)

    def _stages(self, module: nn.Module, spec: LayerSpec) -> list[nn.Module]:
        """Return the modules inside that hold weights."""
        if isinstance(module, ContractedLayer):
            if self.integer:
                raise DecompositionError(
                    f"layer {spec.name!r}: {module.tensor_format.name} of ranks {list(module.ranks)} "
                    "contracts its cores before it computes, so no stage of it can be integers; quantise "
                    "its weights alone (activations='float32'), or the dense layer"
                )
            return [module.core_list]
        stages: list[nn.Module] = [part for part in module.modules() if is_decomposable_module(part)]
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
        """Round the layer's weights so that what one loses others make up for, stage by stage."""
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
                        _equalise(part, problem.metric)
            layer, weight = self.structure(module, spec), problem.target
            for part in layer.modules():
                if isinstance(part, FactorisedLayer):
                    _round_features(part, problem.metric, self.weight_bits)
                    _make_up(part, problem, self.weight_bits)
                    weight = weight_of(part.to_dense())
        return FittedLayer(layer, weight, _error(problem, weight))

    def values(self) -> dict[str, Any]:
        """Return both attributes."""
        return {"weight_bits": self.weight_bits, "activations": self.activations}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        """Read both attributes; strict.

        Raises:
            PlanError: If one is ill-typed.
        """
        bits, activations = values.get("weight_bits", 8), values.get("activations", INTEGERS)
        if type(bits) is not int or bits not in BITS:
            raise PlanError(f"{where}: weight_bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
        if activations not in (INTEGERS, FLOATS):
            raise PlanError(f"{where}: activations must be {INTEGERS} or {FLOATS}, got {activations!r}")
        return cls(bits, activations)


PRECISIONS: dict[str, tuple[Quantise, ...]] = {
    "float32": (),
    "int8": (Quantise(),),
    "int7": (Quantise(REDUCED_BITS),),
    "int8_weights": (Quantise(8, activations=FLOATS),),
    "int4_weights": (Quantise(4, activations=FLOATS),),
}
"""What a layer may compute with, or be stored in, by the name of the option."""


def computes_in_integers(precisions: Iterable[str]) -> bool:
    """Tell whether some of these precisions compute in integers; names that there are not do nothing."""
    return any(operation.integer for name in precisions for operation in PRECISIONS.get(name, ()))


def _equalise(layer: StagedLayer, metric: Metric | None) -> None:
    """Give all channels between two stages the same power, so that one range a tensor suits them all.

    Nothing but the scale of weights changes: what is multiplied into a stage's output channels is taken out
    of the next one's inputs (cross-layer equalisation, Nagel et al., ICCV 2019, with the data's own second
    moments in place of the weights' ranges).
    """
    if layer.kernel is not None and layer.kernel.in_channels != len(layer.reduce.weight):  # type: ignore[arg-type]
        return  # a bond travels in the batch axis: the kernel applies to fewer channels than there are
    cores = [core.detach().double().cpu() for core in layer.cores()]
    output, features = layer.tensor_format.halves(cores, layer.modes)
    weights: list[torch.Tensor] = [stage.weight for stage in layer.stages()]  # type: ignore[misc]
    last = weights[-1].detach().flatten(1).double().cpu()
    if output.shape != last.shape or not torch.allclose(output, last):
        return  # the channels between the stages are in another order than the features
    sizes = [powers(features, metric)]
    if len(weights) == 3:
        modes, first = layer.modes, weights[0].detach().flatten(1).double().cpu()
        moments = None if metric is None else channel_moments(metric, modes.in_channels, modes.kernel)
        sizes.insert(0, powers(first, moments))
    for power, (before, after) in zip(sizes, pairwise(weights), strict=True):
        size = power.clamp_min(_SMALLEST_POWER * power.max().clamp_min(1e-300)).sqrt().to(before)
        depthwise = after.shape[1] == 1 and len(after) == len(size)
        with torch.no_grad():
            before /= size.reshape(-1, *[1] * (before.ndim - 1))
            after *= size.reshape(*[] if depthwise else [1], -1, *[1] * (after.ndim - 1 - (not depthwise)))


def amplification(
    tensor_format: TensorFormat, cores: Cores, modes: WeightModes, metric: Metric | None
) -> float:
    """Return how much larger the features' shares of the output are than the output itself.

    It is sqrt(sum_r |A_r|^2 E[(Q_r x)^2] / E|A Q x|^2): noise in proportion to each feature comes out so much
    larger, beside the output, than it went in. Terms that cancel one another make it large.
    """
    output, features = tensor_format.halves(cores, modes)
    whole = float(powers(output @ features, metric).sum())
    terms = float((output.square().sum(0) * powers(features, metric)).sum())
    return (terms / whole) ** 0.5 if whole > 0 else 1.0


def _round_features(layer: FactorisedLayer, metric: Metric | None, bits: int) -> None:
    """Round the stages before the last one, each for the inputs that it gets behind the rounded ones.

    Of layers that are not made of a stage that mixes channels and one that applies the kernel nothing is
    changed: their weights are rounded to the nearest.
    """
    if not isinstance(layer, StagedLayer) or metric is None or isinstance(layer.reduce, nn.ParameterList):
        return
    modes = layer.modes
    first = _latent(layer.reduce)
    if first.flatten(1).shape[1] != (modes.in_channels if modes.kernel > 1 else metric_columns(metric)):
        return
    inputs: Metric = metric if modes.kernel == 1 else channel_moments(metric, modes.in_channels, modes.kernel)
    _set_latent(layer.reduce, compensated_weight(first.flatten(1), inputs, bits))
    if layer.kernel is None or isinstance(metric, RowFactor) or layer.kernel.in_channels != len(first):
        return
    middle = _latent(layer.kernel)
    if middle[0, 0].numel() != modes.kernel or middle.shape[1] not in (1, len(first)):
        return
    mixing = rounded_weight(_latent(layer.reduce).flatten(1).double().cpu(), bits)
    blocks = metric.reshape(modes.in_channels, modes.kernel, modes.in_channels, modes.kernel)
    if middle.shape[1] == 1:
        groups = torch.einsum("ri,ikjl->rkjl", mixing, blocks)
        own = torch.einsum("rj,rkjl->rkl", mixing, groups)
        repeats = len(middle) // len(first)
        arriving = own.repeat_interleave(repeats, 0)
    else:
        half = torch.einsum("ri,ikjl->rkjl", mixing, blocks)
        arriving = torch.einsum("rkjl,sj->rksl", half, mixing).reshape(middle[0].numel(), -1)
    _set_latent(layer.kernel, compensated_weight(middle.flatten(1), arriving, bits))


def _latent(stage: nn.Module) -> torch.Tensor:
    """Return a rounded stage's weight before it is rounded."""
    return stage.parametrizations["weight"].original.detach()  # type: ignore[index, union-attr]


def _set_latent(stage: nn.Module, weight: torch.Tensor) -> None:
    """Set a rounded stage's weight, in any shape of as many elements."""
    latent: torch.Tensor = stage.parametrizations["weight"].original  # type: ignore[index, union-attr]
    with torch.no_grad():
        latent.copy_(weight.reshape(latent.shape))


def _make_up(layer: FactorisedLayer, problem: RefitProblem, bits: int) -> None:
    """Solve for the output's stage anew, behind the rounded stages before it, and round it.

    Layers without such a stage stay as they are. With rounded features Q the weight is A Q, and
    tr((W - A Q) S (W - A Q)') is least at A = W S Q' (Q S Q')^-1.
    """
    cores = [core.detach().double().cpu() for core in layer.cores()]
    if layer.output_stage(cores) is None:
        return
    output, features = layer.tensor_format.halves(cores, layer.modes)
    target = problem.target.flatten(1)
    weighed = features if problem.metric is None else times(features, problem.metric)
    gram = weighed @ features.T
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-30)
    # Towards what there is: directions that hardly any input takes stay as they were.
    right = (target - output @ features) @ weighed.T
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), right.T).T
    rounded = compensated_weight(output + change, gram, bits)
    stage = layer.output_stage(layer.tensor_format.set_output(cores, layer.modes, rounded))
    if stage is not None:
        _set_latent(*stage)


def _error(problem: RefitProblem, weight: torch.Tensor) -> float:
    """Return |W - V| / |W| in the problem's metric."""
    target = problem.target.flatten(1)
    lost, whole = (float(powers(rows, problem.metric).sum()) for rows in (target - weight.flatten(1), target))
    return (max(0.0, lost) / max(whole, 1e-300)) ** 0.5
