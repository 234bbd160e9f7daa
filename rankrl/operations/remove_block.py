"""Remove the residual block that a layer is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from decomposition import (
    ApplyOptions,
    Cost,
    GroupOperation,
    LayerSpec,
    PlanError,
    compensate,
    inspect_layers,
    register_operation,
)
from decomposition.network.inputs import Inputs, InputShape, example_tensor
from pruning import remove_blocks, residual_blocks


@register_operation
@dataclass(frozen=True)
class RemoveBlock(GroupOperation):
    """Remove the residual block that the layer is in: it hands its input on.

    All layers of a block have to have the operation. With calibration inputs the layers that remain are
    solved for anew, so that they make up for the block (`decomposition.compensate`).

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
        """Refuse a layer that is not in the block.

        Raises:
            PlanError: If it is not.
        """
        if not spec.name.startswith(f"{self.block}."):
            raise PlanError(
                f"layer {spec.name!r} cannot be removed with block {self.block!r}: it is not in it"
            )

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        """Return nothing."""
        return Cost(0, 0, 0)

    def values(self) -> dict[str, Any]:
        """Return the block's name."""
        return {"block": self.block}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        """Read the block's name.

        Raises:
            PlanError: If it is no text.
        """
        if not isinstance(values["block"], str) or not values["block"]:
            raise PlanError(f"{where}: block must be the name of a module, got {values['block']!r}")
        return cls(values["block"])

    @classmethod
    def group_structure(
        cls, model: nn.Module, operations: Mapping[str, Self], input_shape: InputShape
    ) -> nn.Module:
        """Return a copy of `model` without the blocks.

        Raises:
            PlanError: If one is no residual block that can be removed, or a layer in it stays.
        """
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

        With `options.sequential` the layers that stay make up for them.

        Raises:
            PlanError: If one is no residual block that can be removed, or a layer in it stays.
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
    """Return the names of the blocks that are removed, in order of their layers."""
    return list(dict.fromkeys(each.block for each in layers.values()))


def _checked(model: nn.Module, by_layer: Mapping[str, RemoveBlock], input_shape: InputShape) -> list[str]:
    """Return the names of the blocks, after checking that they can be removed as a whole."""
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
