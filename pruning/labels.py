"""Join the labels of channels that can only be removed together (union-find).

Every channel of every tensor carries a label. Labels that meet in an elementwise operation are joined
(union-find), so that after one walk through the network two channels are coupled exactly if their labels have
the same root. This is the dependency graph of Fang et al. (DepGraph, CVPR 2023) at the level of single
channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

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
