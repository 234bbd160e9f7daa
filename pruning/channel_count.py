"""Track channel counts that a network reads from the shape of a tensor and computes with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from pruning.label_arrays import Removal

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
