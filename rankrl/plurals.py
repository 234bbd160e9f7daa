"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 core`, `2 cores`.

    Args:
        count: How many, 0 or more.
        noun: What, in the singular; its plural must end in an s.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
