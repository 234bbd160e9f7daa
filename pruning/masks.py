"""Define the base class of mask layers: one gate per channel, some of them closed for good."""

from __future__ import annotations

import abc

import torch
from torch import nn

from pruning.errors import PruningError


class ChannelMask(nn.Module, abc.ABC):
    """A layer that multiplies every channel of its input by a learned gate.

    Subclasses define the gates and what an open gate costs. A gate that is closed is zero and stays zero,
    whatever the optimizer does (trapping).

    Args:
        units: the number of gates, one per channel (or per unit of a channel group).

    Raises:
        PruningError: if `units` is no positive integer.
    """

    alive: torch.Tensor
    learning_rate: float
    """The learning rate of Adam at which the mask moves from open to closed in a few hundred steps."""
    absorbs_scale: bool = False
    """Whether the gates may take on any scale, so that the norm of the weights can be moved into them."""

    def __init__(self, units: int) -> None:
        super().__init__()
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise PruningError(f"a mask needs a positive number of units, got {units!r}")
        self.units = units
        self.register_buffer("alive", torch.ones(units, dtype=torch.bool))

    @abc.abstractmethod
    def deterministic_gates(self) -> torch.Tensor:
        """Return the gates used at evaluation, shape (units,)."""

    @abc.abstractmethod
    def penalty(self) -> torch.Tensor:
        """Return the penalty of each gate at strength 1, shape (units,); 0 for closed gates."""

    @abc.abstractmethod
    def scores(self) -> torch.Tensor:
        """Return how much each unit matters, shape (units,), detached; closed units score 0, the lowest."""

    @abc.abstractmethod
    def reopen(self, units: torch.Tensor) -> None:
        """Move the gates of `units` (boolean, shape (units,)) as little from zero as makes them open."""

    def rescale(self, factors: torch.Tensor) -> None:
        """Multiply the gates by `factors`, a scalar or of shape (units,).

        Raises:
            PruningError: if the gates have a fixed range (see `absorbs_scale`).
        """
        raise PruningError(f"the gates of a {type(self).__name__} cannot be rescaled: their range is fixed")

    @abc.abstractmethod
    def freeze(self) -> None:
        """End the learning: gates that are zero close, and no gate changes any more."""

    def gates(self) -> torch.Tensor:
        """Return the gates of this forward pass, shape (units,)."""
        return self.deterministic_gates()

    def presence(self, gates: torch.Tensor) -> torch.Tensor:
        """Return the weight of each unit in the statistics of norms over channels, shape (units,).

        A gate from 0 to 1 counts as far as it is open. One of any scale is folded into the reading weights in
        the end, which lie behind the norms: its unit counts in full until it is closed.

        Args:
            gates: of the running pass.
        """
        return (gates != 0).to(gates.dtype) if self.absorbs_scale else gates

    def open_units(self) -> torch.Tensor:
        """Return which units the deterministic gates let through, boolean, shape (units,).

        Raises:
            PruningError: if a gate is not a finite number, which means that training has diverged.
        """
        gates = self.deterministic_gates().detach()
        if not torch.isfinite(gates).all():
            diverged = int((~torch.isfinite(gates)).sum())
            raise PruningError(
                f"{diverged} of {self.units} gates of a {type(self).__name__} are not "
                "finite: training has diverged; lower the learning rate of the masks"
            )
        return gates != 0

    def close(self, units: torch.Tensor) -> None:
        """Close the gates of `units` (boolean, shape (units,)) for good.

        Raises:
            PruningError: if no gate would remain open: a layer never loses all its channels.
        """
        alive = self.alive & ~units.to(self.alive.device)
        if not alive.any():
            raise PruningError(
                f"closing {int(units.sum())} units would close all {self.units} of a mask; keep one"
            )
        self.alive.copy_(alive)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Multiply channel c (axis 1) of `features`, shape (batch, units, ...), by gate c.

        Raises:
            PruningError: if the features have another number of channels.
        """
        if features.ndim < 2 or features.shape[1] != self.units:
            raise PruningError(f"a mask of {self.units} units got features of shape {tuple(features.shape)}")
        return scale_channels(features, self.gates())


def scale_channels(features: torch.Tensor, gates: torch.Tensor, axis: int = 1) -> torch.Tensor:
    """Multiply the c-th slice of `features` along an axis by `gates[c]`."""
    shape = [1] * features.ndim
    shape[axis] = -1
    return features * gates.to(features.dtype).view(shape)
