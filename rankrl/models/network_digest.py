"""The hash that identifies a network in the record of a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decomposition.cache import digest


def network_digest(model: nn.Module) -> str:
    """Return the hash of a network's modules and weights, 16 hexadecimal digits."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    tensors = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    return digest(modules, tensors)[:16]
