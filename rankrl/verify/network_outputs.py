"""What a network answers, as arrays."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from decomposition import Inputs, run_model
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Place, leaves, mapped
from rankrl.device import model_device
from rankrl.errors import ConfigError
from rankrl.verify.fidelity import Array


def network_outputs(network: nn.Module, inputs: Inputs) -> dict[Place, Array]:
    """Return all tensors that a network returns, in order, as arrays, by their places."""
    device = model_device(network)
    with evaluation_mode(network):
        output = run_model(network, mapped(lambda x: x.to(device), inputs))
    tensors = {place: as_array(y) for place, y in leaves(output) if isinstance(y, Tensor)}
    if not tensors:
        raise ConfigError("the network returns no tensor, so that nothing can be compared; give score=")
    return tensors


def as_array(x: Tensor) -> Array:
    """Return a tensor as an array, in float32 where it is in floating point."""
    array: Array = np.asarray((x.float() if x.is_floating_point() else x).detach().cpu())
    return array
