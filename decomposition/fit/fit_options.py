"""Define the options that limit the work of a fit."""

from __future__ import annotations

from dataclasses import dataclass

from decomposition.errors import DecompositionError


@dataclass(frozen=True)
class FitOptions:
    """Limits on the work of a fit.

    Attributes:
        iterations: L-BFGS iterations from the best start, 0 or more; it stops earlier when converged. With
            `stability` half as many again.
        starts: Starting points at most, 1 or more: the algebraic solution, then random ones, until one ends
            where nothing is left to gain. Worth more than 1 for tensor rings and CP, whose problems have
            several minima.
        tolerance: Stop when an iteration lowers the squared relative error by less than this fraction of it.
        patience: Number of iterations over which that gain is averaged, 1 or more.
        seed: Seed of the random starting points.
        enough: Stop when the relative error is at most that, 0 or more. What differs by less is one to who
            chooses ranks by it, and the last iterations of the largest ranks are those that take longest.
        stability: What the size |A|^2 + |Q|^2 of terms that may cancel (CP's) counts besides the squared
            error, as a multiple of it, 0 or more. Terms that cancel on the calibration inputs do not on
            others, nor when they are rounded (Phan et al., ECCV 2020, who minimise their size at a given
            error).
    """

    iterations: int = 60
    starts: int = 1
    tolerance: float = 1e-6
    patience: int = 10
    seed: int = 0
    enough: float = 0.0
    stability: float = 0.03

    def __post_init__(self) -> None:
        limits = (self.tolerance, self.enough, self.stability)
        counts = self.iterations >= 0 and self.starts >= 1 and self.patience >= 1
        if not counts or not all(limit >= 0 for limit in limits):
            raise DecompositionError(
                "fit options need iterations >= 0, starts >= 1, tolerance >= 0, patience >= 1, enough >= 0 "
                f"and stability >= 0, got {self!r}"
            )


FAST = FitOptions()

CHOOSING = FitOptions(tolerance=1e-3, patience=3, enough=5e-3)
"""For fits that serve to choose ranks; the layers of the chosen plan are fitted anew."""

THOROUGH = FitOptions(iterations=1000, starts=16, tolerance=1e-9)
