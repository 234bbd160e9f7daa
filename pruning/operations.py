"""Tabulate torch's operations for the channel walk, by name.

An operation in one of these tables treats each channel separately, or only moves numbers. All others count as
mixing channels, and the channels that reach them are protected: an incomplete table costs
compression, never correctness.
"""

from __future__ import annotations

from typing import Any

from torch import nn

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_BINARY = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "pow"),
    *("maximum", "minimum", "remainder", "fmod", "floor_divide", "floordiv", "mod", "atan2", "where", "lerp"),
    *("addcmul", "addcdiv", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"),
    *("and", "or", "xor", "xlogy", "copysign", "hypot", "rsub"),
)
_UNARY = (
    *("relu", "relu6", "leaky_relu", "rrelu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus"),
    *("hardswish", "hardsigmoid", "hardtanh", "hardshrink", "softshrink", "tanhshrink", "softsign"),
    *("logsigmoid", "threshold", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "clip", "abs", "neg"),
    *("exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "square", "reciprocal", "erf", "sin", "cos"),
    *("sign", "round", "floor", "ceil", "trunc", "nan_to_num", "invert", "logical_not", "isnan", "isfinite"),
    *("contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "bool", "int", "long", "cuda"),
    *("cpu", "requires_grad", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like"),
    *("randn_like", "alias", "positive", "pos", "data"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
)
POINTWISE: frozenset[str] = frozenset(
    form
    for name in (*_UNARY, *_BINARY)
    for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")
)
"""Every number given out depends on the numbers at its own place alone (tensors are broadcast)."""

LIKE_THE_FIRST: frozenset[str] = frozenset({"to", "type_as", "type"})
"""Hand on their first operand; others say only which type or device is wanted."""

FACTORIES: frozenset[str] = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"})
"""Make constants, of which an operand says only the type."""

SPATIAL: dict[str, int] = {
    f"{name}{dims}d": dims
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for dims in (1, 2, 3)
}
"""Work on each channel alone, along as many trailing axes."""

REDUCTIONS: frozenset[str] = frozenset(
    {
        *("mean", "sum", "nansum", "amax", "amin", "max", "min", "prod", "var", "std", "logsumexp", "argmax"),
        *("argmin", "all", "any", "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "flip"),
    }
)
"""Work along the axes of their first argument after the tensor, or `dim`; alone along all others."""

TRANSPOSITIONS: frozenset[str] = frozenset(
    {*("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "unsqueeze")}
)
"""Move whole axes."""

MOVEMENTS: frozenset[str] = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "expand", "expand_as", "view_as"),
        *("reshape_as", "repeat", "repeat_interleave", "tile", "broadcast_to", "chunk", "split", "roll"),
        *("split_with_sizes", "tensor_split", "unbind", "select", "narrow", "index_select", "__getitem__"),
        *("gather", "take_along_dim", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"),
        *("rot90", "fliplr", "flipud", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "meshgrid"),
        *("native_channel_shuffle", "unsafe_chunk", "unsafe_split", "column_stack", "diagonal", "flip"),
    }
)
"""Give out numbers that came in, in other places."""

VALUE_READERS: frozenset[str] = frozenset(
    {
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    }
)
"""Hand the values of a tensor to Python, where they can decide what happens next."""


def channel_axis(layer: nn.Module) -> int:
    """Return the axis, counted from the end, along which a convolution or linear layer reads its inputs."""
    if isinstance(layer, nn.Linear):
        return -1
    return -1 - next(dims for dims, kind in enumerate(CONVOLUTIONS, 1) if isinstance(layer, kind))


def axes_of(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> tuple[int, ...] | None:
    """Return the axes that a reduction works along, None if they are not given: all of them."""
    axes = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if axes is None or isinstance(axes, bool):
        return None
    return tuple(axis % ndim for axis in (axes if isinstance(axes, list | tuple) else (axes,)))


def pad_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """Return the widths, mode and value of a call of `torch.nn.functional.pad`."""
    names = ("input", "pad", "mode", "value")
    arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    return list(arguments["pad"]), arguments.get("mode", "constant"), arguments.get("value")
