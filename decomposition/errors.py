"""Define the exceptions of the decomposition package."""

from __future__ import annotations


class DecompositionError(ValueError):
    """A layer, rank, plan or calibration set that cannot be used.

    The message names the layer or option, the value got, what is allowed and what to do next.
    """


class StorageError(DecompositionError, OSError):
    """A file that cannot be written: the disk is full, or the folder is missing or read-only."""


class PlanError(DecompositionError):
    """A compression plan that is damaged or was made for another model."""
