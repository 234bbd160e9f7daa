"""How integers of a network are chosen: once, for it and for all that is compressed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rankrl.onnx.export.ranges import Array, Range


@dataclass(frozen=True)
class RangeChoice:
    """How ranges of activations and biases of nodes in integers are found, and what they are.

    Attributes:
        way: What ranges are taken of what tensors are on calibration inputs, one of `WAYS`.
        corrected: Whether biases make up for the mean errors of nodes.
        reduced: Whether weights had 7 bits when that was measured.
        ranges: Ranges by the names of tensors.
        moves: How far rounding moves the mean of every output channel, by the names of nodes' outputs.
    """

    way: str
    corrected: bool = False
    reduced: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict, repr=False)
    moves: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def without_values(self) -> RangeChoice:
        """Return the same for a network with other weights, whose values are measured anew."""
        return replace(self, ranges={}, moves={})

    def renamed(self, names: Mapping[str, str]) -> RangeChoice:
        """Return the same for a network whose tensors have other names.

        Args:
            names: What tensors are called here, by what they are called there.
        """
        ranges = {new: self.ranges[old] for new, old in names.items() if old in self.ranges}
        moves = {new: self.moves[old] for new, old in names.items() if old in self.moves}
        return replace(self, ranges=ranges, moves=moves)
