"""A moving average of a network's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of all parameters and buffers (Tarvainen & Valpola 2017, equation 2).

    The decay is min(decay, (1 + n) / (10 + n)) after n updates, so that a short training does not return its
    starting point. Integer buffers, such as the number of batches seen, are copied.

    Args:
        model: The network; the average starts at its values.
        decay: Share of the old average in each update, 0 to below 1.

    Attributes:
        model: A network with the averaged weights.
        updates: Number of updates so far.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the present weights of `model` into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for average, value in zip(_tensors(self.model), _tensors(model), strict=True):
            if average.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Walk over all parameters and buffers, shared ones once."""
    yield from model.parameters()
    yield from model.buffers()
