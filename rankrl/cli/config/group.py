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
    """A group whose choices are registered.

    Attributes:
        noun: What a choice is, in messages.
        known: Returns the registered names.
        about: Says in a sentence or two what a choice is.
        owners: Returns what takes the options of a choice; their docstrings explain them.
        types: Returns the types of the options, and whether a choice takes others too.
        defaults: Returns the options with their defaults; `inspect.Parameter.empty` where there is none.
        key: The option that names the choice.
        nested: Whether its options lie in a mapping `options`, which holds those that are set.
        ours: The names that come with rankrl, whose options never change.
    """

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
