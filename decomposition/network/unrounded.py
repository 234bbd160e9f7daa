"""Outputs of integer layers on their way to where a runtime rounds them.

A convolution's output is rounded behind its batch norm and activation, and two integer tensors are added as
integers. A mark says that a tensor is yet to be rounded; the operation that takes it decides.

Rounding makes a new tensor, which the marked one stands for from then on: views of it, and what is written
into it in place, are those of that tensor.
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

Range = Callable[[torch.Tensor, int], torch.Tensor]
"""Rounds a tensor in the range of a use of a layer."""

# Behind these a convolution's output is still the one tensor that a runtime rounds.
_FUSED = {
    *(F.batch_norm, torch.batch_norm, F.relu, torch.relu, torch.relu_),
    *(torch.Tensor.relu, torch.Tensor.relu_),
}
# These look at a tensor's description alone (`__get__` stands for its properties, views such as `.T` aside).
_LOOKS = {
    *("__get__", "dim", "ndimension", "size", "stride", "numel", "nelement", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "type", "get_device", "element_size"),
}
_SUMS = {
    *(torch.add, torch.Tensor.add, torch.Tensor.add_),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__),
}


class _Unrounded(torch.Tensor):
    """A tensor of integers before it is rounded: the output of an integer layer, or a sum of such.

    Batch norm and ReLU pass it on, an addition rounds it and what it is added to, everything else rounds it.
    """

    numbers: torch.Tensor
    range: Range | None
    use: int
    settled: bool

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
    name = getattr(func, "__name__", "")
    if name == "__hash__":
        return func(*args)
    if name in _LOOKS:
        look = func(*map(_numbers, args), **kwargs)
        if not isinstance(look, torch.Tensor):
            return look
    writes = kwargs.get("out") is not None
    fused = func in _FUSED and not writes and _is_marked(args[0]) and not args[0].settled
    whole = func in _SUMS and not writes and all(map(_is_integer, args[:2]))
    settle = _numbers if fused else _rounded if func in _SUMS else settled
    taking = [settle(value) for value in args]
    result = func(*taking, **{key: settle(value) for key, value in kwargs.items()})
    for owner in (*args[:1], kwargs.get("out")):
        if _is_marked(owner) and owner.numbers is result:
            if fused or whole:
                _mark(owner, result, owner.range if fused else None, owner.use)
            return owner
    if func in _SUMS and taking and result is taking[0] is not args[0]:
        result = args[0].copy_(result)  # a summand in floating point was rounded out of place
    if fused:
        return marked(result, args[0].range, args[0].use)
    return marked(result, None) if whole else result


def marked(x: torch.Tensor, where: Range | None, use: int = 0) -> torch.Tensor:
    """Mark a tensor as yet to be rounded: in a range, or for a sum in the range of its first consumer."""
    if not torch.compiler.is_exporting():
        handle: torch.Tensor = x.as_subclass(_Unrounded)
    elif _TRACES:
        with torch._C.DisableTorchFunction():
            handle = x.view_as(x)
    else:
        raise DecompositionError(
            "torch.export of layers that compute in integers takes the whole network that apply_plan "
            "returned, no part of it; export that, or decomposition.without_rounding(copy.deepcopy(part))"
        )
    handle.is_unrounded = True  # type: ignore[attr-defined]
    _mark(handle, x, where, use)
    return handle


def _mark(handle: Any, numbers: torch.Tensor, where: Range | None, use: int) -> None:
    handle.numbers, handle.range, handle.use, handle.settled = numbers, where, use, False


def taken(x: torch.Tensor, where: Range, use: int = 0) -> torch.Tensor:
    """Return a tensor as an integer layer takes it, unmarked; its other consumers get the same integers."""
    if not _is_marked(x):
        x.integer_range = (where, use, _version(x))  # type: ignore[attr-defined]
        return x
    if x.range is None:  # type: ignore[attr-defined]
        x.range, x.use = where, use  # type: ignore[attr-defined]
    numbers: torch.Tensor = x.numbers  # type: ignore[attr-defined]
    return numbers


def settled(value: Any) -> Any:
    """Round what is still unrounded, inside lists and tuples too."""
    if _is_marked(value):
        if value.range is not None and not value.settled:
            value.numbers, value.settled = value.range(value.numbers, value.use), True
        return value.numbers
    if isinstance(value, list | tuple) and any(map(_is_marked, value)):
        return type(value)(settled(item) for item in value)
    return value


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


def _is_marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and getattr(value, "is_unrounded", False)


def _numbers(value: Any) -> Any:
    """Return the tensor that a marked one stands for, as it is."""
    return value.numbers if _is_marked(value) else value


def _version(x: torch.Tensor) -> float:
    """Return what differs once a tensor was changed in place; NaN, equal to nothing, where that is not known.

    It is not of tensors of `torch.inference_mode`, and where `torch.export` traces strictly.
    """
    return float("nan") if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


def _integer_range(value: Any) -> tuple[Range, int] | None:
    """Return in what range an integer layer takes a tensor, unless it was changed since."""
    where, use, version = getattr(value, "integer_range", (None, 0, 0.0))
    return None if where is None or version != _version(value) else (where, use)


def _is_integer(value: Any) -> bool:
    """Tell whether a summand is in integers, or is taken in integers by a layer."""
    return _is_marked(value) or _integer_range(value) is not None


def _rounded(value: Any) -> Any:
    """Round a summand as well where another layer takes it in integers."""
    known = None if _is_marked(value) else _integer_range(value)
    return settled(value) if known is None else known[0](value, known[1])
