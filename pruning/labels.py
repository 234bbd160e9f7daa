"""Join the labels of channels that can only be removed together (union-find).

Every channel of every tensor carries a label. Labels that meet in an elementwise operation are joined
(union-find), so that after one walk through the network two channels are coupled exactly if their labels have
the same root. This is the dependency graph of Fang et al. (DepGraph, CVPR 2023) at the level of single
channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

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
