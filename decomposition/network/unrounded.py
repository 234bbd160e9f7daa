"""Outputs of integer layers on their way to where a runtime rounds them.

A convolution's output is rounded behind its batch norm and activation, and two integer tensors are added as
integers. A mark says that a tensor is yet to be rounded; the operation that takes it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from decomposition.errors import DecompositionError

Range = Callable[[torch.Tensor], torch.Tensor]
"""Rounds a tensor in a range."""

# Behind these a convolution's output is still the one tensor that a runtime rounds.
_FUSED = {
    *(F.batch_norm, torch.batch_norm, F.relu, torch.relu, torch.relu_),
    *(torch.Tensor.relu, torch.Tensor.relu_),
}
# These look at a tensor's description alone (`__get__` stands for its properties).
_LOOKS = {
    *("__get__", "dim", "ndimension", "size", "stride", "numel", "nelement", "__len__", "__hash__"),
    *("is_contiguous", "is_floating_point", "is_complex", "type", "get_device", "element_size"),
}
_SUMS = {
    *(torch.add, torch.Tensor.add, torch.Tensor.add_),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__),
}


class _Unrounded(torch.Tensor):
    """A tensor of integers before it is rounded: the output of an integer layer, or a sum of such.

    Batch norm and ReLU pass it on, an addition rounds it and what it is added to, everything else rounds it.

    Attributes:
        range: The range; `None` for a sum that no integer layer has taken yet.
    """

    range: Range | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _computed(func, args, dict(kwargs or {}))


class _Tracing(TorchFunctionMode):
    """Does what `_Unrounded` does while `torch.export` runs a network on tensors of its own class."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _computed(func, args, dict(kwargs or {}))


_TRACES: list[_Tracing] = []


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on tensors of which some are marked."""
    if getattr(func, "__name__", "") in _LOOKS:
        return func(*args, **kwargs)
    if func in _FUSED and _is_marked(args[0]):
        return marked(func(_plain(args[0]), *args[1:], **kwargs), args[0].range)
    settle = _rounded if func in _SUMS else settled
    result = func(*map(settle, args), **{key: settle(value) for key, value in kwargs.items()})
    whole = func in _SUMS and all(map(_is_integer, args[:2]))
    return marked(result, None) if whole else result


def marked(x: torch.Tensor, where: Range | None) -> torch.Tensor:
    """Mark a tensor as yet to be rounded: in a range, or for a sum in the range of its first consumer.

    Raises:
        DecompositionError: A part of a network is exported alone.
    """
    if not torch.compiler.is_exporting():
        x = x.as_subclass(_Unrounded)
    elif not _TRACES:
        raise DecompositionError(
            "torch.export of layers that compute in integers takes the whole network that apply_plan "
            "returned, no part of it; export that, or decomposition.without_rounding(copy.deepcopy(part))"
        )
    x.range, x.is_unrounded = where, True  # type: ignore[attr-defined]
    return x


def taken(x: torch.Tensor, where: Range) -> torch.Tensor:
    """Return a tensor as an integer layer takes it, unmarked; its other consumers get the same integers."""
    if not _is_marked(x):
        x.integer_range = where  # type: ignore[attr-defined]
        return x
    x.range = where if x.range is None else x.range  # type: ignore[attr-defined]
    return _plain(x)


def settled(value: Any) -> Any:
    """Round what is still unrounded, inside lists and tuples too."""
    if _is_marked(value):
        return _plain(value) if value.range is None else value.range(_plain(value))
    if isinstance(value, list | tuple) and any(map(_is_marked, value)):
        return type(value)(settled(item) for item in value)
    return value


def round_when_exported(model: nn.Module) -> None:
    """Let `torch.export` trace a network with integer layers, in place."""
    begin, end = TRACING_HOOKS
    if end not in model._forward_hooks.values():
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)


def _begin(_: nn.Module, __: Any) -> None:
    if torch.compiler.is_exporting():
        _TRACES.append(_Tracing())
        _TRACES[-1].__enter__()


def _end(_: nn.Module, __: Any, output: Any) -> Any:
    if not torch.compiler.is_exporting() or not _TRACES:
        return None
    _TRACES.pop().__exit__(None, None, None)
    return tree_map(settled, output)


TRACING_HOOKS = (_begin, _end)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers without the mark."""
    if isinstance(x, _Unrounded):
        return x.as_subclass(torch.Tensor)
    with torch._C.DisableTorchFunction():
        return x.view_as(x)


def _is_marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and getattr(value, "is_unrounded", False)


def _is_integer(value: Any) -> bool:
    """Tell whether a summand is in integers, or is taken in integers by a layer."""
    return _is_marked(value) or hasattr(value, "integer_range")


def _rounded(value: Any) -> Any:
    """Round a summand as well where another layer takes it in integers."""
    where = getattr(value, "integer_range", None)
    return where(value) if where is not None and not _is_marked(value) else settled(value)
