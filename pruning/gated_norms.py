"""Compute layer and RMS norms with statistics that leave channels out, or count them partly.

A removed channel no longer counts in the mean and the variance of its neighbours. A mask that imitates the
removal has to leave the channel out of these statistics, too, not only silence it where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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
