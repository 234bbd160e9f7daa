"""Store and compare label arrays: the channel label of every number in a tensor.

A label array has as many axes as its tensor, and size 1 along those along which the label stays the same: the
output of a convolution, shape (N, C, H, W), has a label array of shape (1, C, 1, 1). Wherever numbers are
moved, by reshaping, transposing or splitting, their labels move in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.labels import ChannelLabels, Labels


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
        """Return the remaining labels, one for each number of a tensor that had shape `shape`.

        None if the removed entries are not whole slices along the axes of the labels.
        """
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
