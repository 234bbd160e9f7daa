"""Define the base classes of operations on layers, and their registry.

An operation is a frozen dataclass: one step of a layer's compression. It converts to and from JSON, and gives
its cost, its structure without values (to load, export and time it) and its fit. A plan holds a list of them
for each layer, applied left to right. Group operations act on several layers at once, so they come first, and
the others see the network that they leave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import nn

from decomposition.calibration.moments import reestimate_batch_norm
from decomposition.errors import PlanError
from decomposition.fit.fit_options import FitOptions
from decomposition.network.inputs import Inputs, InputShape, count_inputs, split
from decomposition.network.layers import LayerSpec
from decomposition.registry import Registry

if TYPE_CHECKING:
    from decomposition.fit.refit import RefitProblem


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
    """Return the cost of the dense layer."""
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
        """Return a copy of `model` with the operations applied.

        Args:
            model: The network; left untouched.
            operations: The operation of each layer that has one, by name.
            input_shape: Shape of one input without the batch axis, or what else is known of the inputs.
            images: Calibration inputs as one batch, or `None`.
            options: How the plan is applied.

        Raises:
            PlanError: If the operations do not fit the network or one another.
        """


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
    """Return the operation called `kind`."""
    return _OPERATIONS[kind]


def operation_from_dict(content: Any, where: str) -> Operation:
    """Read an operation from plain JSON values; strict."""
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
