"""Which residual blocks a search may take out of a network."""

from __future__ import annotations

from torch import nn

from decomposition import compressible_layers
from decomposition.choose.listing import Removal
from decomposition.network.inputs import InputShape, example_tensor
from pruning import residual_blocks
from rankrl.errors import ConfigError
from rankrl.operations import RemoveBlock


def block_removals(model: nn.Module, input_shape: InputShape) -> dict[str, Removal]:
    """Return with which operation layers may leave the network, by name."""
    order = [spec.name for spec in compressible_layers(model, input_shape)]
    removals: dict[str, Removal] = {}
    for block in residual_blocks(model, example_tensor(model, input_shape)):
        layers = [name for name in order if name in block.layers]
        operation = RemoveBlock(block.name)
        removals.update({name: Removal(operation, last=name == layers[-1]) for name in layers})
    if not removals:
        raise ConfigError(
            "decomposition.blocks: the network has no residual block that can be removed, one that adds its "
            "input to an output of the same shape; leave it false"
        )
    return removals
