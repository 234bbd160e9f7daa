"""Define the base class of mask layers: one gate per channel, some of them closed for good."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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


def gated_norm(
    x: Tensor,
    presence: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    centred: bool,
) -> Tensor:
    """Normalise the last axis of x (..., C) by statistics weighted by the channels' `presence` (C,)."""
    values = x.float() if x.element_size() < 4 else x  # as torch's own norms do
    presence = presence.to(values.dtype)
    share = torch.where(presence.sum() > 0, presence, torch.ones_like(presence))
    share = share / share.sum()
    if centred:
        values = values - (values * share).sum(-1, keepdim=True)
    variance = (values.square() * share).sum(-1, keepdim=True)
    values = values * torch.rsqrt(variance + (torch.finfo(values.dtype).eps if eps is None else eps))
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)


class GatedForward:
    """Replaces a norm's `forward`: the norm functions that it calls use only channels that are present."""

    def __init__(self, module: nn.Module) -> None:
        self._forward: Callable[..., Any] = module.forward
        self.presence: Tensor | None = None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own `forward`."""
        if self.presence is None:
            return self._forward(*args, **kwargs)
        with _PresentChannels(self.presence):
            return self._forward(*args, **kwargs)

    @staticmethod
    def remove_from(module: nn.Module) -> None:
        """Restore a norm's own `forward`."""
        gated = module.__dict__.pop("forward")
        if module.forward != gated._forward:  # it had been replaced before
            module.forward = gated._forward


class _PresentChannels(TorchFunctionMode):
    """Runs layer and RMS norm functions as `gated_norm`; norms may permute their input around the call."""

    def __init__(self, presence: Tensor) -> None:
        super().__init__()
        self._presence = presence

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = norm_arguments(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        centred = func.__name__ == "layer_norm"
        eps = call.get("eps", 1e-5 if centred else None)
        return gated_norm(
            call["input"], self._presence, call.get("weight"), call.get("bias"), eps, centred=centred
        )


_ARGUMENTS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
JOINT_NORMS = frozenset(_ARGUMENTS)
"""Operations that normalise all channels together."""


def norm_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a `layer_norm` or `rms_norm` call by name; None for other calls."""
    names = _ARGUMENTS.get(getattr(function, "__name__", ""))
    return None if names is None else {**dict(zip(names, args, strict=False)), **kwargs}
