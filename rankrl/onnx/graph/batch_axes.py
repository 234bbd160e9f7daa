"""Describe the batch axes of a file's inputs, and suggest axes from names and sizes in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph_edits import Array

if TYPE_CHECKING:
    from rankrl.onnx.graph.network import Feed


@dataclass(frozen=True)
class GraphInput:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.name!r} ({self.dtype}, {sizes})"


@dataclass(frozen=True)
class BatchAxes:
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None] = field(default_factory=dict)
    fixed: int | None = None

    def size(self, feed: Feed) -> int:
        """Return the number of inputs in a batch; one where no axis counts them."""
        return next(
            (int(feed[name].shape[axis]) for name, axis in self.inputs.items() if axis is not None), 1
        )

    def check(self, feed: Feed) -> None:
        """Refuse a batch whose arrays count different numbers of inputs."""
        counts = {name: feed[name].shape[axis] for name, axis in self.inputs.items() if axis is not None}
        if len(set(counts.values())) > 1:
            listed = ", ".join(
                f"{name!r} {count} (axis {self.inputs[name]})" for name, count in counts.items()
            )
            raise OnnxGraphError(
                f"the inputs have different numbers of entries on the axes that count them: {listed}; give "
                "as many of each, or say which axes count them, null for an input that goes with every batch "
                f"as it is: {shown_axes(self.inputs)}"
            )

    def rows(self, feed: Feed, index: slice | Array) -> dict[str, Array]:
        arrays = {}
        for name, value in feed.items():
            axis = self.inputs.get(name)
            arrays[name] = value if axis is None else value[(*[slice(None)] * axis, index)]
        return arrays

    def one(self, feed: Feed) -> Feed:
        """Return the first input of a batch, or the batch where its size is fixed."""
        return feed if self.fixed is not None else self.rows(feed, slice(1))

    def parts(self, feed: Feed, size: int) -> Iterator[Feed]:
        """Cut a batch into smaller ones; it stays whole where its size is fixed."""
        if self.fixed is not None:
            yield feed
            return
        for first in range(0, self.size(feed), size):
            yield self.rows(feed, slice(first, first + size))

    def joined(self, feeds: Sequence[Feed]) -> dict[str, Array]:
        """Return batches of one `kind` as one; a single one is not copied."""
        if len(feeds) == 1:
            return dict(feeds[0])
        return {
            name: feeds[0][name] if axis is None else np.concatenate([feed[name] for feed in feeds], axis)
            for name, axis in self.inputs.items()
        }

    def kind(self, feed: Feed) -> tuple[object, ...]:
        """Return a key shared by batches that can be joined: other sizes, and arrays without a batch axis."""
        parts: list[object] = []
        for name, axis in self.inputs.items():
            value = feed[name]
            if axis is None:
                parts.append((value.shape, value.tobytes()))
            else:
                parts.append(value.shape[:axis] + value.shape[axis + 1 :])
        return tuple(parts)

    def first_axis(self, name: str, output: Array) -> Array:
        """Return an output with its batch axis in front; flat where it has none."""
        axis = self.outputs.get(name, 0)
        return output.reshape(-1) if axis is None else np.moveaxis(output, axis, 0) if axis else output


def by_input(numbers: Array, count: int) -> Array:
    """Return numbers as rows (count, numbers), one for each of `count` inputs."""
    if not numbers.ndim or len(numbers) % count:
        numbers = np.pad(numbers.reshape(-1), (0, -numbers.size % count))
    return numbers.reshape(count, -1)


def shown_axes(axes: Mapping[str, int | None]) -> str:
    """Format axes as their option is written on the command line."""
    entries = ", ".join(f"{name}: {'null' if axis is None else axis}" for name, axis in axes.items())
    return f"batch_axes={{{entries}}}"


Axes = Mapping[str, int | None]
"""The axis that counts the inputs of a batch by the name of the input; None for none."""
Shape = tuple[int, ...]

_HINT = "batch"
"""Words that exporters put into the name of the axis."""


def axes_in_file(inputs: Sequence[GraphInput]) -> BatchAxes:
    """Return the batch axes that the names and sizes in a file suggest."""
    axes = next(suggested_axes(inputs, {}, {}))
    return BatchAxes(axes, fixed=declared_batch(inputs, axes))


def declared_batch(inputs: Sequence[GraphInput], axes: Axes) -> int | None:
    counted = [(entry, axis) for entry in inputs if (axis := axes[entry.name]) is not None]
    return next((size for entry, axis in counted if (size := entry.shape[axis]) is not None), None)


def suggested_axes(
    inputs: Sequence[GraphInput], stated: Axes, sizes: Mapping[str, Shape]
) -> Iterator[dict[str, int | None]]:
    """Yield axes for all inputs, the likeliest first; each begins with one axis, which the others follow."""
    left = [entry for entry in inputs if entry.name not in stated and entry.shape]
    known = next(((entry, axis) for entry in inputs if (axis := stated.get(entry.name)) is not None), None)
    free = [(entry, axis) for entry in left for axis in _free(entry)]
    begins = [(entry, axis) for entry, axis in free if axis == 0 or _HINT in entry.names[axis].lower()]
    begins += [(entry, 1) for entry, axis in begins if axis == 0 and 1 in _free(entry)]
    weighty = [entry for entry in left if len(entry.shape) > 1 and _free(entry)]
    if weighty and all(len(entry.shape) == 1 and axis == 0 for entry, axis in begins):
        begins = []  # axes of lengths and masks do not tell those of the arrays next to them
    if known is not None:
        begins = [known]
    elif not begins and left:
        begins = [(_deviating(weighty or left, sizes), 0)]

    def order(begin: tuple[GraphInput, int]) -> tuple[bool, int, bool, int]:
        entry, axis = begin
        others = _following(inputs, stated, sizes, entry, axis)
        without = sum(1 for other in left if _free(other) and others[other.name] is None)
        return (
            _HINT not in entry.names[axis].lower(),
            without,
            axis != 0,
            -int(np.prod(sizes.get(entry.name, ()))),
        )

    if not begins:
        yield {entry.name: stated.get(entry.name) for entry in inputs}
    for entry, axis in sorted(begins, key=order):
        yield _following(inputs, stated, sizes, entry, axis)


def _following(
    inputs: Sequence[GraphInput], stated: Axes, sizes: Mapping[str, Shape], begin: GraphInput, axis: int
) -> dict[str, int | None]:
    """Return the axes of all inputs that follow from the axis of one."""
    axes: dict[str, int | None] = {}
    count = sizes[begin.name][axis] if begin.name in sizes else None
    for entry in inputs:
        if entry.name in stated:
            axes[entry.name] = stated[entry.name]
        elif entry is begin:
            axes[entry.name] = axis
        else:
            axes[entry.name] = _alike(entry, sizes.get(entry.name), begin, axis, count)
    return axes


def _alike(
    entry: GraphInput, shape: Shape | None, begin: GraphInput, axis: int, count: int | None
) -> int | None:
    """Return the axis of an input that counts the same as an axis of another one."""
    if not entry.shape:
        return None
    free, declared, name = _free(entry), begin.shape[axis], begin.names[axis]
    for same in free:
        if name and entry.names[same] == name:
            return same
    fits = range(len(entry.shape)) if shape is None else [k for k, size in enumerate(shape) if size == count]
    other = len(entry.shape) == 1 if declared is not None else bool(name and entry.names[0])
    if 0 in free and (0 in fits or not other):
        return 0  # of another length only where the file suggests that it counts something else
    if shape is not None and any(k in free for k in fits):
        return next(k for k in fits if k in free)
    if shape is not None and count is not None:  # a file of one batch size, given arrays of many inputs
        longer = [k for k, size in enumerate(entry.shape) if size not in (None, shape[k])]
        if len(longer) == 1 and longer[0] in fits:
            return longer[0]
    if declared is None or free:
        return None
    return next((k for k, size in enumerate(entry.shape) if size == declared), None)


def _free(entry: GraphInput) -> list[int]:
    return [axis for axis, size in enumerate(entry.shape) if size is None]


def _deviating(inputs: Sequence[GraphInput], sizes: Mapping[str, Shape]) -> GraphInput:
    """Return the first input that has another length than the file declares, or the first of all."""
    longer = [
        entry
        for entry in inputs
        if entry.name in sizes and entry.shape[0] not in (None, sizes[entry.name][0])
    ]
    return (longer or list(inputs))[0]
