"""Weight decay for a training loop of one's own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from decomposition.apply.forms import factorised_layers


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters of a compressed network in groups for a torch optimizer.

    Each of the n cores of a layer has an n-th of the decay (of PIFA one factor has all), so that the weight
    that they contract to decays, to first order, as that of a dense layer; with all of it on each core it
    would decay n times. Biases and other vectors do not decay.

    Args:
        model: The network; parameters that require no gradient are left out.
        weight_decay: Decay of a dense layer's weight, 0 or more.

    Returns:
        What `torch.optim.AdamW(groups, lr=...)` takes: `params` and their `weight_decay`.
    """
    shares: dict[int, float] = {}
    for layer in factorised_layers(model).values():
        shares |= {id(core): share for core, share in layer.decay_shares().items()}
    groups: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        share = shares.get(id(parameter), float(parameter.ndim > 1))
        if parameter.requires_grad:
            groups[share * weight_decay].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
