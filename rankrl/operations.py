"""Define the plan operations that remove channels or residual blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from decomposition import (
    ApplyOptions,
    CompressionPlan,
    Cost,
    GroupOperation,
    LayerSpec,
    PlanError,
    compensate,
    inspect_layers,
    register_operation,
)
from decomposition.network.inputs import Inputs, InputShape, example_tensor
from pruning import (
    KeptChannels,
    PruningError,
    kept_inputs,
    kept_norms,
    remove_blocks,
    remove_channels,
    residual_blocks,
)

_Result = TypeVar("_Result")


@register_operation
@dataclass(frozen=True)
class KeepChannels(GroupOperation):
    """Keep these output channels of a layer; the others leave the network.

    Layers whose channels are coupled, by a residual addition say, have to keep the same ones. With
    calibration inputs, the remaining layers are solved for anew to compensate for the removed channels
    (`decomposition.compensate`).

    Attributes:
        indices: The channels that stay, sorted.
    """

    indices: tuple[int, ...]

    kind: ClassVar[str] = "keep_channels"
    description: ClassVar[str] = "keep some output channels and remove the others from the network"
    stage: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"keeps {len(self.indices)} channels"

    def check(self, spec: LayerSpec) -> None:
        """Refuse channels that the layer does not have, or that are not sorted.

        Raises:
            PlanError: If there are any.
        """
        indices, last = list(self.indices), spec.out_channels - 1
        if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] > last:
            raise PlanError(
                f"layer {spec.name!r} cannot keep channels {indices}; give some of 0 to {last}, sorted, each "
                "once"
            )

    def values(self) -> dict[str, Any]:
        """Return the channels as plain values."""
        return {"indices": list(self.indices)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        """Read the channels; strict.

        Raises:
            PlanError: If they are not a sorted list of distinct channel numbers, at least one.
        """
        indices = values["indices"]
        whole = isinstance(indices, list) and all(type(each) is int and each >= 0 for each in indices)
        if not whole or not indices or indices != sorted(set(indices)):
            raise PlanError(
                f"{where}: indices must be a sorted list of distinct channel numbers, at least one, got "
                f"{indices!r}"
            )
        return cls(tuple(indices))

    @classmethod
    def group_structure(
        cls, model: nn.Module, operations: Mapping[str, Self], input_shape: InputShape
    ) -> nn.Module:
        """Return a copy of `model` without the other channels.

        Raises:
            PlanError: If the kept channels do not fit the network or one another.
        """
        return _of_kept_channels(remove_channels, model, operations, input_shape)

    @classmethod
    def apply_group(
        cls,
        model: nn.Module,
        operations: Mapping[str, Self],
        input_shape: InputShape,
        images: Inputs | None,
        options: ApplyOptions,
    ) -> nn.Module:
        """Return a copy of `model` without the other channels; the remaining layers compensate for them.

        Without `options.sequential` nothing is compensated. A removal then changes the inputs of batch norms
        by more than their mean, so their statistics are re-estimated on the images, unless
        `options.batch_norm` is `keep`.

        Raises:
            PlanError: If the kept channels do not fit the network or one another.
        """
        correct_mean = options.batch_norm == "mean"
        if images is not None and options.sequential:
            present = _of_kept_channels(kept_inputs, model, operations, input_shape)
            norms = _of_kept_channels(kept_norms, model, operations, input_shape)
            model = compensate(
                model, present, images, substitutes=norms, correct_batch_norm=correct_mean, seed=options.seed
            )
        pruned = cls.group_structure(model, operations, input_shape)
        if options.batch_norm == "reestimate" or (correct_mean and not options.sequential):
            options.reestimate(pruned)
        return pruned


def kept_channels(plan: CompressionPlan) -> dict[str, list[int]]:
    """Return the kept output channels of every layer that loses some; empty if none does."""
    return {name: list(operation.indices) for name, operation in plan.chosen(KeepChannels).items()}


def _of_kept_channels(
    function: Callable[[nn.Module, KeptChannels, torch.Tensor], _Result],
    model: nn.Module,
    by_layer: Mapping[str, KeepChannels],
    input_shape: InputShape,
) -> _Result:
    """Call a function of `pruning` with the kept channels; raise its errors as `PlanError`."""
    kept = {name: list(operation.indices) for name, operation in by_layer.items()}
    try:
        return function(model, kept, example_tensor(model, input_shape))
    except PruningError as error:
        raise PlanError(f"the plan's kept channels do not fit the network: {error}") from error


@register_operation
@dataclass(frozen=True)
class RemoveBlock(GroupOperation):
    """Replace the residual block that contains the layer by the identity.

    All layers of a block must have the operation. With calibration inputs, the remaining layers are solved
    for anew to compensate for the block (`decomposition.compensate`).

    Attributes:
        block: Name of the block's module.
    """

    block: str

    kind: ClassVar[str] = "remove_block"
    description: ClassVar[str] = "remove the residual block that the layer is in"
    stage: ClassVar[int] = -1
    removes: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"removed with block {self.block}"

    def check(self, spec: LayerSpec) -> None:
        if not spec.name.startswith(f"{self.block}."):
            raise PlanError(
                f"layer {spec.name!r} cannot be removed with block {self.block!r}: it is not in it"
            )

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        return Cost(0, 0, 0)

    def values(self) -> dict[str, Any]:
        return {"block": self.block}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        if not isinstance(values["block"], str) or not values["block"]:
            raise PlanError(f"{where}: block must be the name of a module, got {values['block']!r}")
        return cls(values["block"])

    @classmethod
    def group_structure(
        cls, model: nn.Module, operations: Mapping[str, Self], input_shape: InputShape
    ) -> nn.Module:
        return remove_blocks(model, _checked(model, operations, input_shape))

    @classmethod
    def apply_group(
        cls,
        model: nn.Module,
        operations: Mapping[str, Self],
        input_shape: InputShape,
        images: Inputs | None,
        options: ApplyOptions,
    ) -> nn.Module:
        """Return a copy of `model` without the blocks.

        With `options.sequential` the remaining layers compensate for them.
        """
        blocks = _checked(model, operations, input_shape)
        if images is not None and options.sequential:
            correct = options.batch_norm == "mean"
            smaller = compensate(
                model, {}, images, removed=blocks, correct_batch_norm=correct, seed=options.seed
            )
        else:
            smaller = remove_blocks(model, blocks)
        if options.batch_norm == "reestimate":
            options.reestimate(smaller)
        return smaller


def removed_blocks(layers: Mapping[str, RemoveBlock]) -> list[str]:
    return list(dict.fromkeys(each.block for each in layers.values()))


def _checked(model: nn.Module, by_layer: Mapping[str, RemoveBlock], input_shape: InputShape) -> list[str]:
    """Check that the blocks can be removed as a whole, and return their names."""
    known = {each.name for each in residual_blocks(model, example_tensor(model, input_shape))}
    blocks = removed_blocks(by_layer)
    for block in blocks:
        if block not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise PlanError(
                f"{block!r} is no residual block that can be removed from the network; choose from {allowed}"
            )
    inside = tuple(f"{block}." for block in blocks)
    staying = [
        spec.name
        for spec in inspect_layers(model, input_shape)
        if spec.name.startswith(inside) and spec.name not in by_layer
    ]
    if blocks and staying:
        raise PlanError(f"layer {staying[0]!r} is in a block that is removed; give it the same operation")
    return blocks
