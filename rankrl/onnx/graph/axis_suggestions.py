"""Suggesting the axes that count the inputs of a batch, from a file and the arrays for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rankrl.onnx.graph.batch_axes import BatchAxes
from rankrl.onnx.graph.graph_input import GraphInput

Axes = Mapping[str, int | None]
"""The axis that counts the inputs of a batch by the name of the input; None for none."""
Shape = tuple[int, ...]

_HINT = "batch"
"""What exporters put into the name of the axis."""


def axes_in_file(inputs: Sequence[GraphInput]) -> BatchAxes:
    """Return what the names and sizes in a file alone suggest."""
    axes = next(suggested_axes(inputs, {}, {}))
    return BatchAxes(axes, fixed=declared_batch(inputs, axes))


def declared_batch(inputs: Sequence[GraphInput], axes: Axes) -> int | None:
    """Return the batch size that a file declares."""
    counted = [(entry, axis) for entry in inputs if (axis := axes[entry.name]) is not None]
    return next((size for entry, axis in counted if (size := entry.shape[axis]) is not None), None)


def suggested_axes(
    inputs: Sequence[GraphInput], stated: Axes, sizes: Mapping[str, Shape]
) -> Iterator[dict[str, int | None]]:
    """Yield axes for all inputs, the likeliest first.

    Each suggestion begins with one axis of one input, from which those of the others follow.
    """
    left = [entry for entry in inputs if entry.name not in stated and entry.shape]
    known = next(((entry, axis) for entry in inputs if (axis := stated.get(entry.name)) is not None), None)
    free = [(entry, axis) for entry in left for axis in _free(entry)]
    begins = [(entry, axis) for entry, axis in free if axis == 0 or _HINT in entry.names[axis].lower()]
    begins += [(entry, 1) for entry, axis in begins if axis == 0 and 1 in _free(entry)]
    weighty = [entry for entry in left if len(entry.shape) > 1 and _free(entry)]
    if weighty and all(len(entry.shape) == 1 and axis == 0 for entry, axis in begins):
        begins = []  # lengths and masks do not say what the arrays next to them count
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
    """Return the axis of an input that counts what an axis of another one does."""
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
