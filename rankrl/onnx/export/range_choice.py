"""How integers of a network are chosen: once, for it and for all that is compressed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rankrl.onnx.export.ranges import Array, Range


@dataclass(frozen=True)
class RangeChoice:
    """How ranges of activations and biases of nodes in integers are found, and what they are."""

    way: str
    corrected: bool = False
    reduced: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict, repr=False)
    moves: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def without_values(self) -> RangeChoice:
        """Return the same for a network with other weights, whose values are measured anew."""
        return replace(self, ranges={}, moves={})

    def renamed(self, names: Mapping[str, str]) -> RangeChoice:
        """Return the same for a network whose tensors have other names."""
        ranges = {new: self.ranges[old] for new, old in names.items() if old in self.ranges}
        moves = {new: self.moves[old] for new, old in names.items() if old in self.moves}
        return replace(self, ranges=ranges, moves=moves)
