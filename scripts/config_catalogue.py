"""The text of config/catalogue.py: what the command line knows without importing the registries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from decomposition import get_format, list_formats
from rankrl.cli.config.groups import GROUPS
from rankrl.cli.tasks import get_task, list_tasks

CATALOGUE = Path(__file__).parents[1] / "rankrl" / "cli" / "config" / "catalogue.py"
HEAD = '''"""What the command line knows of all that is registered; `rankrl.cli.config.choices` says why.

Written by `scripts/make_config_reference.py` from the registries; a test checks that it is current.
"""

from __future__ import annotations

import collections.abc
import pathlib
import typing

from rankrl.cli.config.group import Choice, Group, catalogued
'''


def catalogue() -> str:
    """Return the module's text."""
    tasks = {name: get_task(name).description for name in list_tasks()}
    formats = {name: get_format(name).tensorisable for name in list_formats()}
    parts = [
        HEAD,
        _mapping("TASKS", "str", tasks, "What each task does."),
        _mapping("FORMATS", "bool", formats, "The tensor formats; whether they can split channel counts."),
        "GROUPS: dict[str, Group] = {",
        *(_group(name) for name in GROUPS),
        "}",
        '"""The groups whose choices are registered."""',
    ]
    return _formatted("\n".join(parts) + "\n")


def _formatted(text: str) -> str:
    """Return the text as `ruff format` leaves it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(CATALOGUE), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _mapping(name: str, values: str, content: dict[str, Any], words: str) -> str:
    lines = [f"    {key!r}: {value!r}," for key, value in content.items()]
    return "\n".join([f"{name}: dict[str, {values}] = {{", *lines, "}", f'"""{words}"""', ""])


def _group(name: str) -> str:
    group = GROUPS[name]
    nested = ", nested=True" if group.nested else ""
    head = f"    {name!r}: catalogued({group.noun!r}, {group.key!r}, {{"
    return "\n".join([head, *(_choice(name, choice) for choice in group.known()), f"    }}{nested}),"])


def _choice(name: str, choice: str) -> str:
    types, takes_others = GROUPS[name].types(choice)
    options = GROUPS[name].options(choice)
    lines = [f"        {choice!r}: Choice("]
    for entries in (
        {key: _source(each) for key, each in types.items()},
        {key: repr(MISSING if each == MISSING else each) for key, each in options.items()},
    ):
        inner = [f"                {key!r}: {text}," for key, text in entries.items()]
        lines += ["            {", *inner, "            },"] if inner else ["            {},"]
    return "\n".join([*lines, "            takes_others=True," if takes_others else "", "        ),"])


def _source(annotation: Any) -> str:
    """Return an annotation as Python writes it."""
    text = annotation.__name__ if isinstance(annotation, type) else repr(annotation)
    if annotation is Any:
        return "Any"
    return re.sub(r"typing\.Optional\[(.*)\]", r"\1 | None", text)
