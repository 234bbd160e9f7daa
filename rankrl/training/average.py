"""A moving average of a network's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


class WeightAverage(AveragedModel):
    """Exponential moving average of all parameters and buffers (Tarvainen & Valpola 2017, equation 2).

    The decay is min(decay, (1 + n) / (10 + n)) after n updates, so that a short training does not return its
    starting point. Integer buffers, such as the number of batches seen, are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._follow, use_buffers=True)
        self.decay = decay
        self.eval().requires_grad_(False)
        self.update_parameters(model)  # torch takes over the first weights as they are

    @torch.no_grad()
    def _follow(self, averages: Tensors, values: Tensors, _: Tensor | int) -> None:
        """Move averages, all of one dtype, towards the present values."""
        if not averages[0].is_floating_point():
            torch._foreach_copy_(averages, values)
            return
        # Not the count that torch passes: it lies on the weights' device, and a GPU would be waited for.
        updates = int(self.n_averaged) - 1
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(averages, values, 1 - decay)
