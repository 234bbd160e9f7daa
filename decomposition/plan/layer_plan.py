"""What becomes of one layer: an entry of a compression plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from decomposition.errors import PlanError
from decomposition.network.layers import LayerSpec
from decomposition.operations import (
    Cost,
    Factorise,
    GroupOperation,
    LayerOperation,
    Operation,
    dense_cost,
    operation_from_dict,
)
from decomposition.operations.base import check_keys

_KEYS = {"name", "operations", "reason"}
_Kind = TypeVar("_Kind", bound=Operation)


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer.

    Costs are counted from the layer as the plan's group operations leave it.

    Attributes:
        name: The layer's dotted name.
        operations: What is done with it, applied left to right; empty for a layer that stays as it is.
        reason: Why nothing is done with it.
    """

    name: str
    operations: tuple[Operation, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        for left, right in pairwise(self.operations):
            if left.stage < right.stage:
                continue
            ordered = " before ".join(
                repr(operation.kind) for operation in sorted((left, right), key=lambda o: o.stage)
            )
            allowed = "one operation of a kind" if left.kind == right.kind else ordered
            raise PlanError(
                f"layer {self.name!r}: operation {right.kind!r} stands after {left.kind!r}; "
                f"a layer takes {allowed}"
            )
        leaving = next((operation for operation in self.group_operations if operation.removes), None)
        if leaving is not None and len(self.operations) > 1:
            raise PlanError(
                f"layer {self.name!r}: operation {leaving.kind!r} removes the layer; it takes no other one"
            )

    @property
    def layer_operations(self) -> tuple[LayerOperation, ...]:
        """The operations on this layer alone."""
        return tuple(operation for operation in self.operations if isinstance(operation, LayerOperation))

    @property
    def group_operations(self) -> tuple[GroupOperation, ...]:
        """The operations on this layer together with others."""
        return tuple(operation for operation in self.operations if isinstance(operation, GroupOperation))

    def operation(self, kind: type[_Kind]) -> _Kind | None:
        """Return the layer's operation of a class, or `None`."""
        return next((operation for operation in self.operations if isinstance(operation, kind)), None)

    def cost(self, spec: LayerSpec) -> Cost:
        """Return the layer's cost under its operations."""
        return total_cost(self.operations, spec)


def total_cost(operations: Sequence[Operation], spec: LayerSpec) -> Cost:
    """Return a layer's cost under operations applied left to right; without any, the dense layer's."""
    cost = dense_cost(spec)
    for operation in operations:
        cost = operation.cost(spec, cost)
    return cost


def without_growth(layer: LayerPlan, spec: LayerSpec) -> LayerPlan:
    """Return the entry, with its factorisation replaced by a reason if it saves no parameters."""
    factorisation = layer.operation(Factorise)
    if factorisation is None:
        return layer
    params = factorisation.cost(spec, dense_cost(spec)).params
    if params < spec.params:
        return layer
    reason = (
        f"{factorisation.format} ranks {list(factorisation.ranks)} take {params} parameters, "
        f"no fewer than the dense {spec.params}"
    )
    return LayerPlan(
        layer.name,
        tuple(operation for operation in layer.operations if operation is not factorisation),
        reason,
    )


def to_entry(layer: LayerPlan) -> dict[str, Any]:
    """Return the entry as plain values for JSON; what is not set is left out."""
    entry: dict[str, Any] = {
        "name": layer.name,
        "operations": [operation.to_dict() for operation in layer.operations],
    }
    if layer.reason is not None:
        entry["reason"] = layer.reason
    return entry


def from_entry(entry: Any, source: str) -> LayerPlan:
    """Read one entry of a plan's JSON; strict."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise PlanError(f"{source}: every layer must be an object with a name, got {entry!r}")
    where = f"{source}, layer {entry['name']!r}"
    check_keys(entry, _KEYS, _KEYS - {"reason"}, where)
    operations, reason = entry["operations"], entry.get("reason")
    if not isinstance(operations, list):
        raise PlanError(f"{where}: operations must be a list, got {operations!r}")
    if reason is not None and not isinstance(reason, str):
        raise PlanError(f"{where}: reason must be text, got {reason!r}")
    read = tuple(operation_from_dict(content, where) for content in operations)
    try:
        return LayerPlan(entry["name"], read, reason)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from error
