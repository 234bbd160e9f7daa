"""Selectors that are compared: by name, or with options of their own, so that one may enter several times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SelectorEntry:
    """A selector that is compared with others."""

    text: str
    selector: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def folder_name(self) -> str:
        """The text as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.text)
