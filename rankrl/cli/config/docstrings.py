"""Explanations of options, from the Google-style docstrings of what takes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

_SECTIONS = ("Args:", "Attributes:")
_ENTRY = re.compile(r"(\*{0,2}\w+): (.*)")
_INDENT = "    "


def explanations(*owners: object) -> dict[str, str]:
    """Return what the sections Args and Attributes say of each name, as one line of text."""
    texts: dict[str, str] = {}
    for owner in owners:
        for documentation in _documentation(owner):
            texts = {**dict(_entries(documentation)), **texts}
    return texts


def summary(owner: object) -> str:
    """Return the first paragraph of a docstring, as one line of text; empty without one."""
    text = next(_documentation(owner), "")
    return " ".join(text.split("\n\n")[0].split())


def _documentation(owner: object) -> Iterator[str]:
    """Yield the docstrings of a function, or of a class and its bases."""
    for each in inspect.getmro(owner) if isinstance(owner, type) else (owner,):
        if each is not object and each.__doc__:
            yield inspect.cleandoc(each.__doc__)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    inside, name, words = False, "", [""]
    for line in [*text.splitlines(), "end"]:
        entry = _ENTRY.fullmatch(line.removeprefix(_INDENT)) if inside else None
        if entry is not None or (line and not line.startswith(_INDENT)):
            if name:
                yield name, " ".join(words)
            name, words = (entry[1], [entry[2]]) if entry is not None else ("", [""])
            inside = entry is not None or line in _SECTIONS
        elif line.strip():
            words.append(line.strip())
