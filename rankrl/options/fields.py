"""Which fields of options the configuration has."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any


def option_fields(section: Any) -> list[Field[Any]]:
    """Return the fields of a section but for those that it names in `PYTHON_ONLY`: constants of a run."""
    return [each for each in fields(section) if each.name not in getattr(section, "PYTHON_ONLY", ())]
