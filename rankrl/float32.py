"""Networks of other floating-point types in float32, as files and our own training take them, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from decomposition.network.inputs import Inputs, mapped
from decomposition.network.surgery import copied, unwrapped

_NARROW = (torch.float16, torch.bfloat16)
_OWN_CLASS = "_class_in_own_types"
_CASTS = {
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}


class _InFloat32(TorchFunctionMode):
    """Lets a forward that casts tensors to some types, or makes some of these, cast to float32 instead."""

    def __init__(self, types: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.types = types

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _CASTS.get(func) in self.types:
            func = torch.Tensor.float
        args, named = tree_map_only(torch.dtype, self._wide, (args, dict(kwargs or {})))
        return func(*args, **named)

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in self.types else dtype


def own_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the types of a network's floating-point parameters and buffers, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


def in_float32(model: nn.Module, *, keep_double: bool = False) -> nn.Module:
    """Return a copy of a network that computes in float32.

    Where parameters have other types, what its forward casts to these stays in float32, too: a network of
    several types casts between its layers.
    """
    network = copied(unwrapped(model))
    types = _NARROW if keep_double else (*_NARROW, torch.float64)
    if not set(types) & set(own_types(network).values()):
        return network
    network._apply(lambda x: x.float() if x.dtype in types else x)
    network.__class__ = _wide_class(type(network), types)
    return network


def _wide_class(base: type[nn.Module], types: Sequence[torch.dtype]) -> type[nn.Module]:
    """Return the class of the same network whose forward runs under `_InFloat32`; copies keep it."""
    run: Callable[..., Any] = base.forward

    @wraps(run)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _InFloat32(types):
            return run(self, *args, **kwargs)

    return type(base.__name__, (base,), {"forward": forward, _OWN_CLASS: base})


def as_float32(inputs: Inputs, *, keep_double: bool = False) -> Inputs:
    """Return a batch of inputs as `in_float32`'s networks take them."""
    types = _NARROW if keep_double else (*_NARROW, torch.float64)
    return mapped(lambda x: x.float() if x.dtype in types else x, inputs)


def back_in(model: nn.Module, types: Mapping[str, torch.dtype]) -> nn.Module:
    """Give a network that `in_float32` returned, or a user's training, its own types back, in place."""
    model.__class__ = getattr(model, _OWN_CLASS, type(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype != types.get(name, tensor.dtype):
            tensor.data = tensor.data.to(types[name])
    return model
