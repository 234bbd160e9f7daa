"""Write docs/configuration.md: every option with its type, default and explanation.

The explanations are the comments in `configs/`, the types those of `rankrl.config.schema`.

    python scripts/make_config_reference.py            # writes docs/configuration.md
    python scripts/make_config_reference.py --check    # exit code 1 if the file is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from rankrl.config.folder import config_folder
from rankrl.config.schema import AppConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# All options

Written by `scripts/make_config_reference.py` from the files in `configs/`; a test checks that it is current.

An option is given as `NAME=VALUE`, a group as `GROUP=CHOICE`; `null` means none. `rankrl --cfg job` prints
the whole configuration of a command without running it.
"""
# Options of whole groups, of Hydra, and the list of defaults have no row of their own.
SKIPPED_BLOCKS = ("defaults", "hydra")


@dataclasses.dataclass(frozen=True)
class Option:
    """One line of a configuration file.

    Attributes:
        name: Dotted name.
        default: The default as it is written.
        comment: The comment above it.
    """

    name: str
    default: str
    comment: str


def read_options(text: str) -> tuple[str, list[Option]]:
    """Read a configuration file.

    A comment explains the options that follow it, up to an empty line or the next comment.

    Args:
        text: The file's content: YAML of nested mappings with one option a line.

    Returns:
        The file's first comment, and its options in order.
    """
    options: list[Option] = []
    comment: list[str] = []
    first: list[str] | None = None
    path: list[tuple[int, str]] = []
    used = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# @"):
            continue
        if stripped.startswith("#"):
            if used:
                comment = []
            used = False
            comment.append(stripped.removeprefix("#").strip())
            continue
        if first is None:
            first, comment = comment, []
        if not stripped or stripped.startswith("- "):
            comment = [] if not stripped else comment
            continue
        match = re.fullmatch(r"([\w.\"]+):\s*(.*)", stripped)
        if match is None:
            continue
        indent = len(line) - len(line.lstrip())
        path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[1])]
        if path[0][1] in SKIPPED_BLOCKS:
            continue
        name = ".".join(key for _, key in path)
        if match[2] or not used:
            options.append(Option(name, match[2], " ".join(comment)))
        used = True
        if not match[2]:  # the comment belongs to the block
            comment = []
    return " ".join(first or comment), options


def option_types(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the type of every option of a schema."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from option_types(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", type_name(hint)


def type_name(hint: object) -> str:
    """Return a type as a reader of the page knows it."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(hint))
    origin = typing.get_origin(hint)
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if origin is list:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if origin is dict:
        return "options"
    return names.get(hint, "any")  # type: ignore[call-overload,no-any-return]


def cell(text: str) -> str:
    """Return text that a Markdown table takes."""
    return text.replace("|", "\\|")


def table(options: list[Option], kinds: dict[str, str]) -> str:
    """Return options as a Markdown table; a comment on several options stands at the first of them."""
    rows = []
    previous = ""
    for option in options:
        default = f"`{cell(option.default)}`" if option.default else ""
        comment = "as above" if option.comment and option.comment == previous else cell(option.comment)
        rows.append(f"| `{option.name}` | {kinds.get(option.name, '')} | {default} | {comment} |")
        previous = option.comment
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows])


def reference() -> str:
    """Return the page."""
    folder = config_folder()
    kinds = dict(option_types(AppConfig))
    _, options = read_options((folder / "config.yaml").read_text(encoding="utf-8"))
    parts = [HEAD, "## Options of every run\n", table(options, kinds), ""]
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "hydra"):
        parts.append(f"\n## `{group.name}=`\n")
        for path in sorted(group.glob("*.yaml")):
            about, options = read_options(path.read_text(encoding="utf-8"))
            if group.name != "experiment":
                options = [dataclasses.replace(each, name=f"{group.name}.{each.name}") for each in options]
            parts += [f"### `{group.name}={path.stem}`\n", f"{about}\n"]
            if options:
                parts.append(table(options, kinds) + "\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def main() -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only compare, with exit code 1 if not current")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page (default: docs/configuration.md)")
    arguments = parser.parse_args()
    page = reference()
    if arguments.check:
        current = arguments.output.is_file() and arguments.output.read_text(encoding="utf-8") == page
        if not current:
            advice = "run python scripts/make_config_reference.py"
            print(f"{arguments.output} is not current: {advice}", file=sys.stderr)
        return 0 if current else 1
    arguments.output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
