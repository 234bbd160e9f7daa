"""Register entries that are chosen by name, and suggest the nearest name for a typo."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")

_ANNOUNCED: dict[str, list[str]] = {}
_REGISTRIES: dict[str, Registry[Any]] = {}


def registered(noun: str) -> list[str]:
    """Return the names registered so far under this noun, sorted, without importing anything."""
    return sorted(_REGISTRIES[noun]._entries) if noun in _REGISTRIES else []


def announce(noun: str, module: str) -> None:
    """Announce a module that registers entries; it is imported when the registry is first read."""
    if module not in _ANNOUNCED.setdefault(noun, []):
        _ANNOUNCED[noun].append(module)


class Registry(Generic[Entry]):
    """Names, one-line descriptions, and what each name stands for.

    Args:
        noun: What is registered, for messages: `format`, `selector`, ...
        error: Makes the exception for a name that is taken or unknown.
    """

    def __init__(self, noun: str, error: Callable[[str], Exception]) -> None:
        self.noun = noun
        self._error = error
        self._entries: dict[str, tuple[Entry, str]] = {}
        _REGISTRIES.setdefault(noun, self)

    def add(self, name: str, entry: Entry, description: str = "") -> Entry:
        """Register `entry` and return it.

        Args:
            name: The name it is chosen by.
            entry: What the name stands for.
            description: One line for listings.

        Raises:
            Exception: The registry's own error, if the name is taken.
        """
        if name in self._entries:
            raise self._error(f"there is a {self.noun} {name!r} already; choose another name")
        self._entries[name] = (entry, description)
        return entry

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._import_announced()
        return name in self._entries

    def __getitem__(self, name: str) -> Entry:
        return self._find(name)[0]

    def description(self, name: str) -> str:
        """Return the description of `name`; raises the errors of `registry[name]`."""
        return self._find(name)[1]

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names that match a shell-style pattern, sorted."""
        self._import_announced()
        return sorted(name for name in self._entries if fnmatchcase(name, pattern))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo the registrations of the block at its end; for tests."""
        self._import_announced()  # an import inside the block would be undone for good
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries.clear()
            self._entries.update(before)

    def _import_announced(self) -> None:
        for module in _ANNOUNCED.get(self.noun, ()):
            importlib.import_module(module)

    def _find(self, name: str) -> tuple[Entry, str]:
        if name not in self:
            raise self._error(
                f"there is no {self.noun} {name!r}; choose from {', '.join(self.names())}."
                f"{did_you_mean(name, self._entries)}"
            )
        return self._entries[name]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty text if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
