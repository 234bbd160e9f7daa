"""Options of the rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CountedCost = Literal["params", "macs"]


@dataclass(frozen=True)
class AccuracyOptions:
    """Options of `accuracy`: none."""


@dataclass(frozen=True)
class AMCOptions:
    """Options of `amc`."""

    measure: CountedCost = "params"


@dataclass(frozen=True)
class WeightedOptions:
    """Options of `weighted`."""

    compression: float = 0.3
    measure: CountedCost = "params"


REWARDS: dict[str, type] = {"accuracy": AccuracyOptions, "amc": AMCOptions, "weighted": WeightedOptions}
"""Options by the reward's name."""
