"""Describe what a channel walk meets and finds: labels, operations, calls, counts of channels.

Every channel of every tensor carries a label. Labels that meet in an elementwise operation are joined
(union-find), so that after one walk through the network two channels are coupled exactly if their labels have
the same root. This is the dependency graph of Fang et al. (DepGraph, CVPR 2023) at the level of single
channels.

An operation in one of the tables treats each channel separately, or only moves numbers. All others count as
mixing channels, and the channels that reach them are protected: an incomplete table costs compression, never
correctness.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

Labels = tuple[int, ...]
"""One label per channel, in channel order."""


class ChannelLabels:
    """A union-find over channel labels, each with an optional obstacle: the reason why it must stay."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._obstacle: dict[int, str] = {}

    def new(self, count: int, obstacle: str | None = None) -> Labels:
        """Return `count` fresh labels; with an `obstacle` they can never be removed."""
        start = len(self._parent)
        labels = tuple(range(start, start + count))
        self._parent.extend(labels)
        if obstacle is not None:
            self.protect(labels, obstacle)
        return labels

    def root(self, label: int) -> int:
        """Return the representative of all labels joined with `label`."""
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label

    def roots(self, labels: Iterable[int]) -> Labels:
        """Return the representative of each label."""
        return tuple(self.root(label) for label in labels)

    def join(self, first: Iterable[int], second: Iterable[int]) -> None:
        """Couple two equally long rows of channels position by position."""
        for a, b in zip(first, second, strict=True):
            kept, merged = self.root(a), self.root(b)
            if kept == merged:
                continue
            self._parent[merged] = kept
            if merged in self._obstacle:
                self._obstacle.setdefault(kept, self._obstacle[merged])

    def protect(self, labels: Iterable[int], obstacle: str) -> None:
        """Forbid the removal of `labels`; the first obstacle given is the one that is reported."""
        for label in labels:
            self._obstacle.setdefault(self.root(label), obstacle)

    def obstacle(self, label: int) -> str | None:
        """Return why `label` must stay, or None if it may go."""
        return self._obstacle.get(self.root(label))

    def reword(self, old: str, new: str) -> None:
        """Replace the obstacle `old` by `new` everywhere."""
        self._obstacle = {root: new if said == old else said for root, said in self._obstacle.items()}

    def copy(self) -> Self:
        """Return a copy on which couplings can be tried."""
        other = type(self)()
        other.adopt(self)
        return other

    def adopt(self, other: ChannelLabels) -> None:
        """Adopt the couplings and obstacles of a copy."""
        self._parent, self._obstacle = other._parent.copy(), other._obstacle.copy()


def label_row(labels: Labels, axis: int, ndim: int) -> Tensor:
    """Return the label array of a tensor of `ndim` axes whose channels lie along `axis`."""
    shape = [1] * ndim
    shape[axis] = len(labels)
    return torch.tensor(labels, dtype=torch.int64).view(shape)


def labels_in(array: Tensor) -> list[int]:
    """Return the labels of an array, in order."""
    row: list[int] = array.flatten().tolist()
    return row


def label_axes(array: Tensor) -> list[int]:
    """Return the axes along which labels differ."""
    return [axis for axis, size in enumerate(array.shape) if size > 1]


def slices(array: Tensor, axis: int) -> Tensor:
    """Return the entries at each place along an axis, one row for each place."""
    return array.movedim(axis, 0).unsqueeze(-1).flatten(1)


def compressed(array: Tensor) -> Tensor:
    """Return an array with size 1 along every axis along which the label stays the same."""
    for axis, size in enumerate(array.shape):
        if size > 1 and bool((array == array.narrow(axis, 0, 1)).all()):
            array = array.narrow(axis, 0, 1)
    return array


def rooted(array: Tensor, labels: ChannelLabels) -> Tensor:
    """Return the roots of an array's labels, compressed."""
    return compressed(torch.tensor(labels.roots(labels_in(array)), dtype=torch.int64).view(array.shape))


@dataclass(frozen=True)
class Removal:
    """A trial removal of labels, to see how a computation changes without them."""

    labels: ChannelLabels
    gone: frozenset[int]

    def takes(self, array: Tensor) -> Tensor:
        """Mark the removed entries of a label array, boolean, of its shape."""
        flags = [self.labels.root(label) in self.gone for label in labels_in(array)]
        return torch.tensor(flags, dtype=torch.bool).view(array.shape)

    def rest(self, array: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the labels left of a tensor of shape `shape`, one a number; None if no whole slices go."""
        lost, sizes = self.takes(array), list(shape)
        for axis in label_axes(array):
            whole = slices(lost, axis).all(1)
            staying = (~whole).nonzero().flatten()
            array, lost = array.index_select(axis, staying), lost.index_select(axis, staying)
            sizes[axis] = len(staying)
        return None if bool(lost.any()) else array.expand(sizes)

    def count(self, array: Tensor, axis: int) -> int:
        """Count the remaining slices of a label array along an axis."""
        return int((~slices(self.takes(array), axis).all(1)).sum())


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


_TORCH = str(Path(torch.__file__).parent / "_")[:-1]
_HERE = str(Path(__file__).parent / "_")[:-1]

CHANGING = frozenset({"__setitem__", "__set__", "__delitem__"})
"""Operations that change a tensor and give nothing out."""


@dataclass
class Call:
    """A watched call of a torch operation."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: str
    module: nn.Module
    arrays: dict[int, tuple[Tensor, torch.Size]] = field(default_factory=dict)

    @property
    def own_arrays(self) -> list[Tensor]:
        """The label arrays of the arguments."""
        return [array for array, _ in self.arrays.values()]

    @property
    def title(self) -> str:
        """The operation, its module and its line, for messages."""
        if type(self.module).__module__.startswith("torch.nn.modules."):
            return f"the layer {self.owner!r} ({type(self.module).__name__})"
        name = self.name.strip("_") or self.name
        return f"{name} in {self.owner or 'the network'}.forward{line_of(calling_frame())}"


def calling_frame() -> FrameType | None:
    """Return the innermost running frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def is_networks_own(frame: FrameType) -> bool:
    """Tell whether a frame runs the code of a network: neither this package's nor torch's."""
    return not (is_of_torch(frame) or frame.f_code.co_filename.startswith(_HERE))


def is_of_torch(frame: FrameType) -> bool:
    """Tell whether a frame runs torch's own code, whose checks do not depend on the network."""
    return frame.f_code.co_filename.startswith(_TORCH)


def line_of(frame: FrameType | None) -> str:
    """Return the line of the network's own code that a frame runs or was called from, in brackets."""
    while frame is not None and is_of_torch(frame):
        frame = frame.f_back
    if frame is None or not is_networks_own(frame):
        return ""
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


Fix = Callable[[Iterable[Tensor]], None]


class ChannelCount(int):
    """The size of an axis of channels, which shrinks as they go; where its number is used, they stay."""

    arrays: tuple[Tensor, ...]
    after: Callable[[Removal], int]
    fix: Fix

    @classmethod
    def of(
        cls, value: int, arrays: Iterable[Tensor], after: Callable[[Removal], int], fix: Fix
    ) -> ChannelCount:
        """Return `value` as a count, see the attributes."""
        count = cls(value)
        count.arrays, count.after, count.fix = tuple(arrays), after, fix
        return count

    def number(self) -> int:
        """Return the plain number, and keep the channels that it counts from now on."""
        self.fix(self.arrays)
        return _plain(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChannelCount) and self._counts_the_same(other):
            return _plain(self) == _plain(other)
        return self.number() == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_plain(self))

    def _counts_the_same(self, other: ChannelCount) -> bool:
        return len(self.arrays) == len(other.arrays) and all(
            a.shape == b.shape and bool((a == b).all())
            for a, b in zip(self.arrays, other.arrays, strict=True)
        )


def after_removal(number: int, removal: Removal | None) -> int:
    """Return a number after a removal of channels: smaller if it counts them, else the same."""
    return (
        number.after(removal) if removal is not None and isinstance(number, ChannelCount) else _plain(number)
    )


def _plain(number: int) -> int:
    """Return a channel count, or any other number, as a plain number."""
    return int.__add__(number, 0)


def _following(operation: Callable[[int, int], int], swapped: bool) -> Callable[[ChannelCount, Any], Any]:
    """Make an arithmetic method whose result is a channel count, too."""

    def method(self: ChannelCount, other: Any) -> Any:
        if not isinstance(other, int):
            number = self.number()
            return operation(other, number) if swapped else operation(number, other)
        first, second = (other, self) if swapped else (self, other)
        arrays = [array for operand in (first, second) for array in getattr(operand, "arrays", ())]
        return ChannelCount.of(
            operation(_plain(first), _plain(second)),
            arrays,
            lambda removal: operation(after_removal(first, removal), after_removal(second, removal)),
            self.fix,
        )

    return method


def _fixing(operation: Callable[[Any, Any], Any], swapped: bool) -> Callable[[ChannelCount, Any], Any]:
    """Make a method that uses the plain number, so that the counted channels must stay."""

    def method(self: ChannelCount, other: Any) -> Any:
        number = self.number()
        return operation(other, number) if swapped else operation(number, other)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _operation = getattr(operator, _name)
    setattr(ChannelCount, f"__{_name}__", _following(_operation, swapped=False))
    setattr(ChannelCount, f"__r{_name}__", _following(_operation, swapped=True))
for _name in ("truediv", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _operation, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(ChannelCount, f"__{_name}__", _fixing(_operation, swapped=False))
    setattr(ChannelCount, f"__r{_name}__", _fixing(_operation, swapped=True))
for _name, _operation in (
    ("lt", operator.lt),
    ("le", operator.le),
    ("gt", operator.gt),
    ("ge", operator.ge),
    ("divmod", divmod),
):
    setattr(ChannelCount, f"__{_name}__", _fixing(_operation, swapped=False))
for _type in (int, float, abs, round, operator.neg):
    setattr(ChannelCount, f"__{_type.__name__}__", lambda self, *_, make=_type: make(self.number()))


@dataclass(frozen=True)
class ChannelPad:
    """Labels that a zero-padding module puts before and after the channels it receives."""

    before: Labels
    after: Labels


@dataclass
class ChannelWalk:
    """Labels found by a channel walk, by name in order of execution."""

    labels: ChannelLabels = field(default_factory=ChannelLabels)
    producers: dict[str, Labels] = field(default_factory=dict)
    readers: dict[str, Labels] = field(default_factory=dict)
    norms: dict[str, Labels] = field(default_factory=dict)
    joint_norms: dict[str, Labels] = field(default_factory=dict)
    grouped: dict[str, tuple[Labels, Labels]] = field(default_factory=dict)
    vectors: dict[str, Labels] = field(default_factory=dict)
    pads: dict[str, ChannelPad] = field(default_factory=dict)
