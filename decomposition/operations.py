"""Define the operations of a plan on layers: base classes, registry, factorisation and rounding.

An operation is a frozen dataclass: one step of a layer's compression. It converts to and from JSON, and gives
its cost, its structure without values (to load, export and time it) and its fit. A plan holds a list of them
for each layer, applied left to right. Group operations act on several layers at once, so they come first, and
the others see the network that they leave. Other packages register their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

import torch
from torch import nn

from decomposition.calibration.moments import reestimate_batch_norm
from decomposition.errors import DecompositionError, PlanError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.fitting import fit_weight
from decomposition.fit.refit import PATCHES_TO_SOLVE, RefitProblem
from decomposition.fit.rounding import compensated_weight, equalise, make_up, round_features
from decomposition.formats import Ranks, TensorFormat, get_format, list_formats
from decomposition.formats.layers import FactorisedLayer, StagedLayer
from decomposition.network.geometry import WeightModes, modes_from_dict
from decomposition.network.inputs import Inputs, InputShape, count_inputs, split
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
from decomposition.registry import Registry

BatchNormCorrection = Literal["keep", "mean", "reestimate"]
FINAL = FitOptions(iterations=200)
# Inputs in a batch of re-estimation: bounds the memory of activations.
_STATISTICS_BATCH = 256


@dataclass(frozen=True)
class Cost:
    """Cost of a layer.

    Attributes:
        params: Parameters, bias included.
        macs: Multiply-accumulates for one model input, all calls together.
        bytes: Bytes of its parameters in a file.
        time: Measured time, in any unit; `None` where it was not measured.
        rows: Output channels of all its weights together: each has a scale of its own when it is quantised.
    """

    params: int
    macs: int
    bytes: int
    time: float | None = None
    rows: int = 0


def dense_cost(spec: LayerSpec) -> Cost:
    whole = spec.storage.whole
    size = spec.bytes_of(spec.params) if whole is None else whole
    return Cost(spec.params, spec.macs, size, rows=spec.out_channels)


@dataclass(frozen=True)
class ApplyOptions:
    """Options of `decomposition.apply_plan`.

    Attributes:
        sequential: Fit each layer to the inputs that it receives in the compressed network.
        weigh_outputs: Weigh a layer's output channels by their effect on the network's output.
        batch_norm: What becomes of running statistics: `keep`, correct the `mean`, or `reestimate`.
        fit: How much work each fit may do.
        max_patches: Input patches that each layer is fitted on at most.
        seed: Seed of the patch positions.
        statistics: Inputs that running statistics are re-estimated on; `None` without calibration inputs.
    """

    sequential: bool = True
    weigh_outputs: bool = True
    batch_norm: BatchNormCorrection = "mean"
    fit: FitOptions = FINAL
    max_patches: int = 65_536
    seed: int = 0
    statistics: Inputs | None = None

    def reestimate(self, model: nn.Module) -> None:
        """Re-estimate the running statistics of batch norms in place, if there are inputs for it."""
        if self.statistics is not None:
            count = count_inputs(self.statistics)
            parts = -(-count // _STATISTICS_BATCH)  # nearly equal parts: none holds a single input
            reestimate_batch_norm(model, split(self.statistics, -(-count // max(1, parts))))


@dataclass(frozen=True)
class FittedLayer:
    """The module that an operation made of a layer, and its weight."""

    module: nn.Module
    weight: torch.Tensor


@dataclass(frozen=True)
class Operation(ABC):
    """One step of a plan for a layer.

    Attributes:
        kind: Name in the registry and in plans.
        description: One line for listings.
        stage: A layer's operations are ordered by ascending stage, at most one of each stage.
        removes: Whether the layers themselves leave the network.
    """

    kind: ClassVar[str]
    description: ClassVar[str]
    stage: ClassVar[int]
    removes: ClassVar[bool] = False

    @property
    def integer(self) -> bool:
        """Whether the layer takes and gives integers afterwards."""
        return False

    @property
    def computes_integers(self) -> bool:
        """Whether the layer multiplies integers afterwards, whatever it takes and gives."""
        return self.integer

    @abstractmethod
    def check(self, spec: LayerSpec) -> None:
        """Refuse a layer that the operation cannot be applied to.

        Raises:
            DecompositionError: Naming the layer, the value and what is allowed.
        """

    @abstractmethod
    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        """Return the layer's cost under this operation.

        Args:
            spec: The layer as the group operations left it.
            before: Its cost under the operations to the left.
        """

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return the operation's fields as plain values for JSON; what is not set is left out."""

    @classmethod
    @abstractmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        """Make the operation from what `values` returned; strict.

        Args:
            values: The fields; their names have been checked.
            where: Plan and layer, for messages.

        Raises:
            PlanError: If a value is ill-typed.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the operation as plain values for JSON."""
        return {"operation": self.kind, **self.values()}


class LayerOperation(Operation):
    """An operation on one layer."""

    @abstractmethod
    def structure(self, module: nn.Module, spec: LayerSpec) -> nn.Module:
        """Return the layer that replaces `module`, without setting its values.

        Args:
            module: The layer under the operations to the left.
            spec: The dense layer.
        """

    @abstractmethod
    def fit(
        self,
        module: nn.Module,
        spec: LayerSpec,
        problem: RefitProblem,
        *,
        sensitivity: torch.Tensor | None,
        options: FitOptions,
    ) -> FittedLayer:
        """Return the fitted layer that replaces `module`.

        Args:
            module: The layer under the operations to the left.
            spec: The dense layer.
            problem: What it has to reproduce.
            sensitivity: G (out, out) of the network's output to the layer's; `None` counts channels alike.
            options: How much work to do.
        """


class GroupOperation(Operation):
    """An operation on several layers at once."""

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        """Return `before`: `spec` is the layer as the group operations left it."""
        return before

    @classmethod
    @abstractmethod
    def group_structure(
        cls, model: nn.Module, operations: Mapping[str, Self], input_shape: InputShape
    ) -> nn.Module:
        """Return a copy of `model` with the structure that the operations leave; its values do not matter.

        Args:
            model: The network; left untouched.
            operations: The operation of each layer that has one, by name.
            input_shape: Shape of one input without the batch axis, or what else is known of the inputs.

        Raises:
            PlanError: If the operations do not fit the network or one another.
        """

    @classmethod
    @abstractmethod
    def apply_group(
        cls,
        model: nn.Module,
        operations: Mapping[str, Self],
        input_shape: InputShape,
        images: Inputs | None,
        options: ApplyOptions,
    ) -> nn.Module:
        """Return a copy of `model` with the operations applied; arguments are as of `group_structure`."""


_OPERATIONS: Registry[type[Operation]] = Registry("operation", PlanError)

_Class = TypeVar("_Class", bound=type[Operation])


def register_operation(cls: _Class) -> _Class:
    """Class decorator: add an operation to the registry under its `kind`."""
    _OPERATIONS.add(cls.kind, cls, cls.description)
    return cls


def list_operations() -> list[str]:
    """Return the kinds of all registered operations."""
    return _OPERATIONS.names()


def operation_kind(kind: str) -> type[Operation]:
    return _OPERATIONS[kind]


def operation_from_dict(content: Any, where: str) -> Operation:
    if not isinstance(content, dict) or not isinstance(content.get("operation"), str):
        raise PlanError(
            f"{where}: an operation must be an object with its kind as `operation`, got {content!r}"
        )
    try:
        cls = operation_kind(content["operation"])
    except PlanError as error:
        raise PlanError(f"{where}: {error} Other packages register theirs when they are imported") from error
    allowed = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is MISSING}
    values = {key: value for key, value in content.items() if key != "operation"}
    check_keys(values, allowed, required, f"{where}, {cls.kind}")
    return cls.from_values(values, f"{where}, {cls.kind}")


def check_keys(entry: Mapping[str, Any], allowed: set[str], required: set[str], source: str) -> None:
    """Refuse unknown and missing entries of a JSON object."""
    unknown, missing = sorted(set(entry) - allowed), sorted(required - set(entry))
    if unknown or missing:
        raise PlanError(
            f"{source}: unknown entries {unknown}, missing entries {missing}; allowed: {sorted(allowed)}"
        )


class ChannelFactors(NamedTuple):
    """Small factors into which channel counts are split (tensorised weights).

    Attributes:
        out: Factors of the output channels.
        inp: Factors of the input channels.
    """

    out: tuple[int, ...]
    inp: tuple[int, ...]


@register_operation
@dataclass(frozen=True)
class Factorise(LayerOperation):
    """Write the weight as the cores of a tensor format.

    Attributes:
        format: Name of the tensor format.
        ranks: One rank a bond of the format.
        factors: How channel counts are split; `None` when they are not.
    """

    format: str
    ranks: Ranks
    factors: ChannelFactors | None = None

    kind: ClassVar[str] = "factorise"
    description: ClassVar[str] = "write the weight as the cores of a tensor format"
    stage: ClassVar[int] = 10

    def __str__(self) -> str:
        return f"{self.format} {', '.join(map(str, self.ranks))}"

    @property
    def tensor_format(self) -> TensorFormat:
        return get_format(self.format)

    def modes(self, spec: LayerSpec) -> WeightModes:
        return modes_from_dict(spec, None if self.factors is None else _as_dict(self.factors))

    def check(self, spec: LayerSpec) -> None:
        if spec.refusal is not None:
            raise PlanError(f"layer {spec.name!r} cannot be decomposed: {spec.refusal}")
        self.tensor_format.check_ranks(self.modes(spec), self.ranks, spec.name)

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        modes, bias = self.modes(spec), spec.out_channels if spec.bias else 0
        params = self.tensor_format.params(modes, self.ranks) + bias
        macs = self.tensor_format.macs(spec, modes, self.ranks)
        rows = self.tensor_format.rows(spec, modes, self.ranks)
        return Cost(params, macs, spec.bytes_of(params), rows=rows)

    def structure(self, module: nn.Module, spec: LayerSpec) -> FactorisedLayer:
        dense = cast(DecomposableModule, module)
        layer = self.tensor_format.build(dense, spec, self.modes(spec), self.ranks)
        layer.freeze_like(dense.weight, dense.bias)
        return layer.train(dense.training)

    def fit(
        self,
        module: nn.Module,
        spec: LayerSpec,
        problem: RefitProblem,
        *,
        sensitivity: torch.Tensor | None,
        options: FitOptions,
    ) -> FittedLayer:
        layer = self.structure(module, spec)
        fit = fit_weight(
            layer.tensor_format,
            problem.target,
            layer.modes,
            self.ranks,
            problem.metric,
            options,
            sensitivity=sensitivity,
            start=problem.start,
        )
        layer.load(fit.cores, cast(DecomposableModule, module).bias, fit.error)
        weight = layer.to_dense().weight.detach()
        return FittedLayer(layer, weight.double().cpu().reshape(*weight.shape[:2], -1))

    def values(self) -> dict[str, Any]:
        content: dict[str, Any] = {"format": self.format, "ranks": list(self.ranks)}
        if self.factors is not None:
            content["factors"] = _as_dict(self.factors)
        return content

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        name, ranks, factors = values["format"], values["ranks"], values.get("factors")
        if name not in list_formats():
            raise PlanError(f"{where}: unknown format {name!r}; choose from {', '.join(list_formats())}")
        if not _are_counts(ranks):
            raise PlanError(f"{where}: ranks must be a list of integers of at least 1, got {ranks!r}")
        if factors is None:
            return cls(name, tuple(ranks))
        if not (
            isinstance(factors, dict)
            and set(factors) == {"out", "in"}
            and all(map(_are_counts, factors.values()))
        ):
            raise PlanError(f"{where}: factors must be {{'out': [...], 'in': [...]}}, got {factors!r}")
        return cls(name, tuple(ranks), ChannelFactors(tuple(factors["out"]), tuple(factors["in"])))


def factors_of(modes: WeightModes) -> ChannelFactors | None:
    """Return the channel factors of a weight's modes; `None` when no channel count is split."""
    return None if modes.plain else ChannelFactors(modes.out, modes.inp)


def _as_dict(factors: ChannelFactors) -> dict[str, Any]:
    return {"out": list(factors.out), "in": list(factors.inp)}


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(n) is int and n >= 1 for n in values)


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
