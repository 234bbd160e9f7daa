"""Schedule mask training: alternation of network and masks, temperature, strength of the penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pruning.errors import PruningError


def linear(start: float, end: float, progress: float) -> float:
    """Interpolate linearly from `start` (at progress 0) to `end` (at progress 1 and beyond)."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


@dataclass(frozen=True)
class PushPull:
    """Alternate between steps of the network's weights and steps of the masks.

    Attributes:
        network_steps: steps in which only the network learns.
        mask_steps: steps after them in which only the masks learn; with 0 for both, all learn in every step.

    Raises:
        PruningError: if only one of the numbers is zero, or one is negative.
    """

    network_steps: int = 0
    mask_steps: int = 0

    def __post_init__(self) -> None:
        together = self.network_steps == self.mask_steps == 0
        if not together and min(self.network_steps, self.mask_steps) < 1:
            raise PruningError(
                f"push-pull needs at least one step for each side, got {self.network_steps} for the network "
                f"and {self.mask_steps} for the masks (0 and 0 train both in every step)"
            )

    def turns(self, step: int) -> tuple[bool, bool]:
        """Return whether the network and whether the masks learn in `step` (counted from 0)."""
        if self.network_steps == 0:
            return True, True
        network = step % (self.network_steps + self.mask_steps) < self.network_steps
        return network, not network


class StrengthController:
    """Adapts the strength of the penalty so that the gates close along a line, without tuning.

    A proportional-integral controller on the logarithm of the strength. The line leads to no gates at all at
    the end of the pruning phase; the training leaves it where the cost of the network reaches its target. It
    watches the soft measure of openness that the penalty itself lowers: the cost of the network answers too
    late, because gates move long before they close.

    Args:
        strength: the strength to start from, positive.
        proportional: gain on the present deviation from the line.
        integral: gain on the deviation summed over the training progress.

    Raises:
        PruningError: if the strength is not positive and finite.
    """

    LARGEST_CHANGE = math.log(1e4)
    """The strength stays within this factor (in logarithm) of the one it starts from."""

    def __init__(self, strength: float, proportional: float = 10.0, integral: float = 50.0) -> None:
        if not (math.isfinite(strength) and strength > 0):
            raise PruningError(f"the strength to start from must be positive and finite, got {strength}")
        self.start = strength
        self.proportional, self.integral = proportional, integral
        self._sum = 0.0
        self._progress = 0.0

    def state(self) -> list[float]:
        """Return the controller's state, for `restore`."""
        return [self._sum, self._progress]

    def restore(self, state: Sequence[float]) -> None:
        """Restore a `state`."""
        self._sum, self._progress = state

    def update(self, openness: float, progress: float) -> float:
        """Return the strength for the next step.

        Args:
            openness: the present penalty as a fraction of the initial one.
            progress: through the pruning phase, in [0, 1].
        """
        deviation = openness - linear(1.0, 0.0, progress)
        change = self._sum + self.integral * deviation * (progress - self._progress)
        self._sum = min(max(change, -self.LARGEST_CHANGE), self.LARGEST_CHANGE)
        self._progress = progress
        exponent = min(
            max(self._sum + self.proportional * deviation, -self.LARGEST_CHANGE), self.LARGEST_CHANGE
        )
        return self.start * math.exp(exponent)
