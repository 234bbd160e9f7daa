"""Sections of a Markdown page that programs write, between markers."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankrl.files import write_atomically


def shown_command(
    arguments: Sequence[str], *, shortened: Mapping[str, str] | None = None, dropped: Sequence[str] = ()
) -> str:
    """Return the command line for a page that others read: nothing in it belongs to this machine alone."""
    words: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word not in dropped:
            words.append((shortened or {}).get(word, word))
        skip = word in dropped
    variables = [f"{name}={os.environ[name]} " for name in ("OMP_NUM_THREADS",) if name in os.environ]
    if "RANKRL_DATA" in os.environ:
        variables.insert(0, "RANKRL_DATA=data ")
    return f"{''.join(variables)}python {shlex.join(words)}"


def write_section(path: Path, marker: str, title: str, text: str) -> None:
    """Put text between a section's markers in a Markdown file, or its tables into a CSV file, atomically."""
    if path.suffix == ".csv":
        write_atomically(path, _comma_separated(text))
        return
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    document = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    section = f"{start}\n{text}\n{end}"
    if start in document and end in document:
        before, rest = document.split(start, 1)
        document = before + section + rest.split(end, 1)[1]
    elif start in document or end in document:
        raise ValueError(f"{path} has only one of {start} and {end}: put the other one back")
    else:
        document = f"{document.rstrip()}\n\n## {title}\n\n{section}\n"
    write_atomically(path, document)


def _comma_separated(text: str) -> str:
    """Return the tables of a Markdown text as CSV, and its other lines as comments."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for line in filter(None, text.splitlines()):
        if not line.startswith("|"):
            lines.write(f"# {line}\n")
        elif set(line) - set("|-: "):
            writer.writerow(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
    return lines.getvalue()
