"""Define the exception of the pruning package."""

from __future__ import annotations


class PruningError(ValueError):
    """A layer, option or target that cannot be pruned as asked; the message names it and the remedy."""
