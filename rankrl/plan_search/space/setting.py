"""The part of a search that is known before anything is trained, calibrated or fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSetting:
    """The part of a search that a selector's options may contradict, known from its options alone.

    Attributes:
        measures: What the budgets count, such as `params`; empty without a budget.
        narrows: Whether channels between layers, or whole blocks, may be removed.
        borders: Whether a budget in time counts the changes between integers and floating point.
        in_workers: Whether plans are scored in other processes.
    """

    measures: tuple[str, ...]
    narrows: bool = False
    borders: bool = False
    in_workers: bool = False
