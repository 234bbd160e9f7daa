"""The part of a search that is known before anything is trained, calibrated or fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSetting:
    """The part of a search that a selector's options may contradict, known from its options alone."""

    measures: tuple[str, ...]
    narrows: bool = False
    borders: bool = False
    in_workers: bool = False
