"""Modules that compute for both halves of a batch: the dense network's and the compressed network's."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import nn

from decomposition.network.kinds import BatchNorm

_Replaced = TypeVar("_Replaced", bound=nn.Module)


class StandIn(nn.Module, Generic[_Replaced]):
    """Replaces a module and forwards its attributes, which the network's own code may read."""

    dense: _Replaced

    def __init__(self, dense: _Replaced) -> None:
        super().__init__()
        self.dense = dense

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("dense"), name)


class RemovedBlock(nn.Module):
    """A block for the first half of the batch, nothing for the second."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.dense = (block.eval(),)  # in a tuple: its layers and norms are no longer the network's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block on the first half and pass the second half on."""
        dense_input, arriving = x.chunk(2)
        return torch.cat([self.dense[0](dense_input), arriving])


class Substituted(StandIn[nn.Module]):
    """A module for the first half of the batch, another one for the second."""

    def __init__(self, dense: nn.Module, substitute: nn.Module) -> None:
        super().__init__(dense)
        self.substitute = substitute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run each module on its half."""
        dense, arriving = x.chunk(2)
        return torch.cat([self.dense(dense), self.substitute(arriving)])


class NormPair(StandIn[BatchNorm]):
    """A batch norm whose running mean follows the shift of the compressed half's mean."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__(norm)
        self.shift: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise both halves, the second one around its shifted mean."""
        norm = self.dense
        dense, arriving = x.chunk(2)
        if self.shift is None:
            axes = [axis for axis in range(x.ndim) if axis != 1]
            self.shift = arriving.mean(axes) - dense.mean(axes)
        expected, mean = norm(dense), norm.running_mean
        assert mean is not None
        # Through the norm itself: subclasses may do more than normalise.
        norm.running_mean = mean + self.shift
        try:
            moved = norm(arriving)
        finally:
            norm.running_mean = mean
        return torch.cat([expected, moved])

    def finish(self) -> nn.Module:
        """Return the batch norm with its mean shifted."""
        if self.shift is not None and self.dense.running_mean is not None:
            self.dense.running_mean += self.shift
        return self.dense
