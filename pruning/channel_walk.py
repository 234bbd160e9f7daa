"""Describe what a walk of the channels meets and finds: calls, counts of channels, labels."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pruning.labels import ChannelLabels, Labels, Removal

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
    """The size of an axis of channels, which shrinks as channels are removed.

    Sums, differences, products and whole quotients of it shrink accordingly. Where the number itself enters
    the computation, as a divisor or in a comparison, the channels that it counts have to stay.
    """

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
