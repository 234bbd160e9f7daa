"""Words around numbers."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 core`, `2 cores`, `1,024 images`.

    Args:
        count: How many.
        noun: What, in the singular; its plural ends in s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
