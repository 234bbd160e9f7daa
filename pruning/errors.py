"""The exception that every refusal of this package raises."""

from __future__ import annotations


class PruningError(ValueError):
    """A layer, option or target that cannot be pruned as asked; the message names it and says what to do."""
