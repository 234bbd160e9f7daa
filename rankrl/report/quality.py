"""How good a run's networks are: by the user's own score, by test accuracy, by their agreement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankrl.report.stages import format_accuracy, format_points, stages

AGREEMENT = "Agreement"
"""Title of how far outputs agree with the original's."""


@dataclass(frozen=True)
class Quality:
    """One measure of how good networks are, higher is better."""

    title: str
    values: tuple[float | None, ...]
    is_share: bool = True

    @property
    def words(self) -> str:
        """Its name within a sentence: "test accuracy", "mean IoU"."""
        return self.title.lower() if self.title[1:].islower() else self.title

    @property
    def before(self) -> float | None:
        """The original's value."""
        return self.values[0]

    @property
    def after(self) -> float | None:
        """The last network's value."""
        return self.values[-1]

    @property
    def change(self) -> str:
        """The difference, with its sign: in points for fractions."""
        if self.is_share or self.before is None or self.after is None:
            return format_points(self.before, self.after)
        return f"{self.after - self.before:+.4g}".replace("-", "−")

    def write(self, value: float | None) -> str:
        """Write a value: fractions as percent, others to four digits."""
        if self.is_share or value is None:
            return format_accuracy(value)
        return f"{value:.4g}".replace("-", "−")


HELDOUT_ACCURACY = Quality("Held-out accuracy", ())
"""What the best epoch is chosen by, unless the run names another score."""


def score_quality(metrics: Mapping[str, Any]) -> Quality | None:
    """Return the score that plans were chosen by, where the run gives it a name (`score_name`)."""
    name, values = metrics.get("score_name"), tuple(stage.score for stage in stages(metrics))
    known = [value for value in values if value is not None]
    if not name or not known:
        return None
    return Quality(str(name), values, all(0 <= value <= 1 for value in known))


def epoch_score(metrics: Mapping[str, Any]) -> Quality:
    """Return what the epochs of fine-tuning are judged by."""
    return score_quality(metrics) or HELDOUT_ACCURACY


def qualities(metrics: Mapping[str, Any]) -> list[Quality]:
    """Return what was measured of how good the networks are, what counts most first.

    That is the score that plans were chosen by, then test accuracy, then the agreement with the original.
    """
    score, run_stages = score_quality(metrics), stages(metrics)
    measured = [
        Quality("Test accuracy", tuple(stage.accuracy for stage in run_stages)),
        Quality(AGREEMENT, tuple(stage.agreement for stage in run_stages)),
    ]
    return [
        *([] if score is None else [score]),
        *(each for each in measured if any(value is not None for value in each.values)),
    ]
