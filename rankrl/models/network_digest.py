"""The hash that identifies a network in the record of a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decomposition.cache import digest
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, run_model, tensors_in


def network_digest(model: nn.Module) -> str:
    """Return the hash of a network's modules and weights, 16 hexadecimal digits."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    tensors = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    return digest(modules, tensors)[:16]


def behaviour_digest(model: nn.Module, inputs: Inputs) -> str:
    """Return a hash that also tells networks of one name and the same weights apart by what they compute."""
    with evaluation_mode(model), torch.no_grad():
        answers = tensors_in(run_model(model, inputs))
    return digest(network_digest(model), list(answers), torch.__version__)
