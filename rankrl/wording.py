"""Words around numbers."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 core`, `2 cores`, `1,024 images`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
