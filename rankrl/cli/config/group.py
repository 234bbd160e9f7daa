"""What a group of the configuration is whose choices are registered things, and what is known of a choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from rankrl.option_types import OptionTypes


@dataclass(frozen=True)
class Group:
    """A group whose choices are registered."""

    noun: str
    known: Callable[[], Sequence[str]]
    about: Callable[[str], str]
    owners: Callable[[str], tuple[object, ...]]
    types: Callable[[str], tuple[OptionTypes, bool]]
    defaults: Callable[[str], dict[str, Any]]
    key: str = "name"
    nested: bool = False
    ours: Collection[str] = ()

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of a choice with their defaults as the configuration holds them."""
        return {key: _plain(value) for key, value in self.defaults(name).items()}

    def node(self, name: str) -> dict[str, Any]:
        """Return what the configuration holds for a choice."""
        options = self.options(name)
        return {self.key: name, **({"options": options} if self.nested else options)}


def _plain(value: Any) -> Any:
    """Return a default as YAML has it."""
    if value is inspect.Parameter.empty:
        return MISSING
    return list(value) if isinstance(value, tuple) else value
