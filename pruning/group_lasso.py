"""Learn a factor per channel under an L1 penalty (group LASSO)."""

from __future__ import annotations

import torch
from torch import nn

from pruning.masks import ChannelMask
from pruning.registry import register_pruner

REOPENED = 1e-2
"""The size of a factor that is moved away from zero."""


@register_pruner("group_lasso", "learned factor per channel with an L1 penalty")
class GroupLassoMask(ChannelMask):
    """Multiplies every channel by a factor beta, on which an L1 penalty lies.

    The factor follows Liu et al. (network slimming, 2017), the name Yuan and Lin (2006):
    if the weights that read channel c are held at a fixed norm, |beta_c| is the norm of the product, and the
    penalty is exactly the group LASSO on the reading weights. Without such a constraint, or a penalty on the
    weights, a ReLU network undoes the mask by scaling weights up as beta goes down.

    Args:
        units: the number of channels.
        initial: the factor to start from.
    """

    absorbs_scale = True
    learning_rate = 0.02

    def __init__(self, units: int, initial: float = 1.0) -> None:
        super().__init__(units)
        self.weight = nn.Parameter(torch.full((units,), float(initial), dtype=torch.float32))

    def deterministic_gates(self) -> torch.Tensor:
        """Return beta, shape (units,), zero where closed."""
        return torch.where(self.alive, self.weight, 0.0)

    def penalty(self) -> torch.Tensor:
        """Return |beta|, shape (units,), zero where closed."""
        return self.deterministic_gates().abs()

    def scores(self) -> torch.Tensor:
        """Return |beta|, shape (units,), detached."""
        return self.penalty().detach()

    def reopen(self, units: torch.Tensor) -> None:
        """Set the factors of `units` that are smaller than `REOPENED` to it, keeping their sign."""
        with torch.no_grad():
            sign = torch.where(self.weight < 0, -1.0, 1.0)
            small = units & (self.weight.abs() < REOPENED)
            self.weight.copy_(torch.where(small, sign * REOPENED, self.weight))
            self.alive |= units

    def rescale(self, factors: torch.Tensor) -> None:
        """Multiply the factors beta by `factors`, a scalar or of shape (units,)."""
        with torch.no_grad():
            self.weight.mul_(factors)

    def freeze(self) -> None:
        """Close the factors that are zero and stop training the others."""
        self.close(~self.open_units())
        self.weight.requires_grad_(False)
