"""Sections of a Markdown page that programs write, between markers."""

from __future__ import annotations

from pathlib import Path

from rankrl.files import write_atomically


def write_section(path: Path, marker: str, title: str, text: str) -> None:
    """Put text between a section's markers in a Markdown file, which is replaced atomically.

    Args:
        path: The file; made when missing. Without the markers the section is appended.
        marker: The section's name in its markers, `<!-- NAME:start -->` and `<!-- NAME:end -->`.
        title: Heading of a section that is appended.
        text: The section's text.

    Raises:
        ValueError: If only one of the markers is there.
        StorageError: The file cannot be written.
    """
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
