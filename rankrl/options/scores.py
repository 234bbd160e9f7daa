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
        augmented: Score one fixed augmented copy of the held-out images: a network that has seen them in its
            training has not seen them like this.
        refit_images: Training images that `statistics` of `refitted` solve every layer on.
        batch_size: Images in a batch; None for what suits the device.
    """

    # Each device has a size of batches that suits it, and scores do not depend on it.
    PYTHON_ONLY = ("batch_size",)

    augmented: bool = True
    refit_images: int = 512
    batch_size: int | None = None

    def __post_init__(self) -> None:
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
