"""Text on the command line that Hydra's grammar does not take as it is: quoted for it, or told how.

Hydra reads a value as a word, a number, a list, a sweep; an equals sign or a letter with an accent ends that.
File names have both, so what cannot be anything but text is quoted here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # Hydra has no public way to tell flags from overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

# What has a meaning of its own in values: lists, mappings, quotes, interpolations, escapes.
_SYNTAX = re.compile(r"""[\[\]{}'"\\]|\$\{""")
_INTERPOLATION = re.compile(r"\$\{[^'\"\\]*\}")  # which Hydra reads unquoted unless it holds another
_FUNCTION = re.compile(
    r"\s*(?:choice|range|interval|glob|sort|shuffle|tag|extend_list|str|int|float|bool|json_str)\("
)
_WORD = re.compile(r"[\w.,/+:-]*", re.ASCII)  # what needs no parser to be read
_SHELL = re.compile(r"[\"\\$`!]")


def readable_arguments(arguments: Sequence[str]) -> list[str]:
    """Return arguments as Hydra reads them: overrides before flags, text in quotes where it needs them.

    Line ends, which scripts written on Windows have, are left out. What stands between commas is quoted one
    by one, so that several values stay a sweep. Only what Hydra cannot read is touched, and only what has no
    brackets, quotes or interpolations in it; `resume=` is read without Hydra.
    """
    overrides, others = [], []
    before = ""
    for argument in (each.rstrip("\r\n") for each in arguments):
        if before not in _flags_with_values() and re.match(r"[^-].*=|~", argument, re.DOTALL):
            overrides.append(_with_quotes(argument))
        elif argument or before in _flags_with_values():
            others.append(argument)
        before = argument
    return [*overrides, *others]


@cache
def _flags_with_values() -> frozenset[str]:
    actions = get_args_parser()._option_string_actions
    return frozenset(flag for flag, action in actions.items() if action.nargs is None)


def quoted(key: str, value: str) -> str:
    """Return an override whose value Hydra takes as it is, whatever characters it has."""
    return f"{key}={_in_quotes(value)}"


def in_hydra(value: Any) -> str:
    """Return a plain value as Hydra reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_hydra, value))}]"
    return _in_quotes(value) if isinstance(value, str) else json.dumps(value)


def quoting_advice(argument: str) -> str:
    """Return the argument as it can be pasted into a shell where its value is meant as text."""
    line = quoted(*_parts(argument))
    return shlex.quote(line) if _SHELL.search(line) else f'"{line}"'


def is_readable(argument: str) -> bool:
    """Tell whether Hydra can read an override."""
    try:
        OverridesParser.create().parse_override(argument)
    except (HydraException, RecursionError):
        return False
    return True


def _with_quotes(argument: str) -> str:
    key, value = _parts(argument)
    if _INTERPOLATION.fullmatch(value) and not is_readable(argument):
        return quoted(key, value)
    called = re.search(r"[()]", value) and ("," in value or _FUNCTION.match(value))
    untouched = key in ("", "resume") or key[0] == "~" or _SYNTAX.search(value) or called
    if untouched or _WORD.fullmatch(value) or is_readable(argument):
        return argument
    texts = value.split(",")
    changed = ",".join(text if is_readable(f"{key}={text}") else _in_quotes(_at_home(text)) for text in texts)
    # A line end within, or nothing between two commas, is no text that anybody means.
    return (
        f"{key}={changed}"
        if value.isprintable() and all(texts) and is_readable(f"{key}={changed}")
        else argument
    )


def _parts(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    return key, value


def _in_quotes(value: str) -> str:
    """Return text in Hydra's quotes, where backslashes mean something before a quote alone."""
    text = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), value)
    return f"'{text}'"


def _at_home(text: str) -> str:
    """Return a path below the home folder in full: shells do not do so in the middle of a word."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text
