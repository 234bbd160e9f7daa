"""How plans are scored on held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from rankrl.errors import ConfigError, did_you_mean

Term = Literal["accuracy", "agreement", "soft_agreement"]
Statistics = Literal["corrected", "refitted"]


@dataclass(frozen=True)
class ScoringOptions:
    """How plans are scored.

    Attributes:
        term: `accuracy` on the labels; `agreement`, the share of images on which the plan and the dense
            network choose the same class; `soft_agreement`, the mean overlap sum_k min(p_k, q_k) of their
            class probabilities, which moves with every change of the weights.
        augmented: Score one fixed augmented copy of the held-out images: a network that has seen them in its
            training has not seen them like this.
        statistics: `corrected` moves biases and batch-norm means analytically; `refitted` solves every layer
            for what reaches it, as applying the plan does, which is what a plan becomes and takes several
            times as long (`decomposition.candidates.quick_refit`).
        refit_images: Training images that `refitted` solves on.
        batch_size: Images in a batch; None for what suits the device.
    """

    # Each device has a size of batches that suits it, and scores do not depend on it.
    PYTHON_ONLY = ("batch_size",)

    term: Term = "accuracy"
    augmented: bool = True
    statistics: Statistics = "corrected"
    refit_images: int = 512
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("search.term", self.term, Term)
        check_choice("search.statistics", self.statistics, Statistics)
        for name in ("refit_images", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"search.{name} must be at least 1, got {value}")


def check_choice(option: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of a Literal's.

    Raises:
        ConfigError: Naming the option, the value and what is allowed.
    """
    allowed = get_args(choices)
    if value not in allowed:
        raise ConfigError(
            f"{option} must be one of {', '.join(allowed)}, got {value!r}.{did_you_mean(value, allowed)}"
        )
