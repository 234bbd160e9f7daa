"""Follow channels through operations that move numbers: reshaping, splitting, indexing, stacking.

The operation runs on the labels of the numbers. Trial removals test whether the network still works once
channels are gone: the operation runs again on the remaining labels, with the sizes that the network would
then read from its tensors, and must return the remainder of its outputs. Couplings that make it do so, such
as that of the two halves of a split, are tried as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pruning.channel_count import ChannelCount, after_removal
from pruning.label_arrays import Removal, compressed, label_axes, labels_in, rooted, slices
from pruning.labels import ChannelLabels

Labelled = tuple[Tensor, torch.Size]
"""The label array and the shape of a tensor."""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the leaves of a call's arguments, inside their containers."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(bound, change) for bound in (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(mapped(item, change) for item in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a call's arguments or results: everything but containers."""
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def moved(
    labels: ChannelLabels,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Mapping[int, Labelled],
) -> list[Tensor] | None:
    """Return the label arrays of an operation's outputs, joining labels of its inputs where needed."""

    def run(removal: Removal | None) -> list[Tensor] | None:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) not in operands:
                    return leaf.detach().cpu()  # indices of labels, which are on the CPU
                array, shape = operands[id(leaf)]
                rest = array.expand(shape) if removal is None else removal.rest(array, shape)
                if rest is None:
                    raise ValueError("what goes is no whole slice")
                # Floats: every operation takes them, and small integers are exact.
                return rest.float().contiguous()
            return after_removal(leaf, removal) if isinstance(leaf, ChannelCount) else leaf

        return [leaf.long() for leaf in leaves(function(*mapped(args, change), **mapped(kwargs, change)))]

    try:
        whole = run(None) or []
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # tensors that are indices or types cannot be replaced by labels
    shapes = [array.shape for array in whole]
    outputs = [compressed(array) for array in whole]
    entering = dict.fromkeys(label for array, _ in operands.values() for label in labels_in(array))
    free = [label for label in entering if labels.obstacle(label) is None]
    counted = [leaf.arrays for leaf in leaves((args, kwargs)) if isinstance(leaf, ChannelCount)]
    entered = [*(array for array, _ in operands.values()), *(array for arrays in counted for array in arrays)]
    for coupled in _couplings(labels, entered, outputs):
        if all(_comes_out_right(run, outputs, shapes, removal) for removal in _trials(coupled, free)):
            labels.adopt(coupled)
            return [rooted(array, labels) for array in outputs]
    return None


def _couplings(
    labels: ChannelLabels, entered: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Iterator[ChannelLabels]:
    """Yield the couplings to try: none, then those of labels at equal places along an axis.

    Then the same with operands and channel counts of equal size coupled, such as a view of one layer's output
    by the number of another's channels (squeeze and excitation).
    """
    yield from _along_axes(labels, outputs)
    coupled = labels.copy()
    rows = [row for row in map(labels_in, entered) if len(row) > 1]
    pairs = [
        (first, second) for first, second in itertools.combinations(rows, 2) if len(first) == len(second)
    ]
    for first, second in pairs:
        coupled.join(first, second)
    if pairs:
        yield from _along_axes(coupled, outputs)


def _along_axes(labels: ChannelLabels, outputs: Sequence[Tensor]) -> Iterator[ChannelLabels]:
    yield labels
    axes = sorted({axis for array in outputs for axis in label_axes(array)}, reverse=True)
    if len(axes) == 1 and len(outputs) == 1:
        return
    for axis in axes:
        sizes = {array.shape[axis] for array in outputs if array.ndim > axis}
        if len(sizes) > 1:
            continue
        coupled = labels.copy()
        together = torch.cat([slices(array, axis) for array in outputs], 1)
        for other in together.unbind(1)[1:]:
            coupled.join(labels_in(together[:, 0]), labels_in(other))
        yield coupled


def _trials(labels: ChannelLabels, free: Sequence[int]) -> Iterator[Removal]:
    """Yield the trial removals: the first unit, the last one, half of them, all but one."""
    units = [root for root in dict.fromkeys(labels.roots(free)) if labels.obstacle(root) is None]
    if len(units) < 2:
        return
    half = random.Random(0).sample(units, len(units) // 2)
    middle = units[len(units) // 2]
    for gone in (units[:1], units[-1:], half, [unit for unit in units if unit != middle]):
        yield Removal(labels, frozenset(gone))


def _comes_out_right(
    run: Callable[[Removal], list[Tensor] | None],
    outputs: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    removal: Removal,
) -> bool:
    try:
        results = run(removal) or []
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # the operation fails on the remaining labels
    expected = [removal.rest(array, shape) for array, shape in zip(outputs, shapes, strict=True)]
    return len(results) == len(expected) and all(
        rest is not None and result.shape == rest.shape and bool((result == rest).all())
        for result, rest in zip(results, expected, strict=True)
    )
