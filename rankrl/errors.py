"""Define the errors that users can cause and cure, and format counts with their nouns."""

from __future__ import annotations

from decomposition.registry import did_you_mean


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 core`, `2 cores`, `1,024 images`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DefectError",
    "FolderInUseError",
    "ModelError",
    "NonFiniteError",
    "RankrlError",
    "StorageError",
    "did_you_mean",
]


class RankrlError(Exception):
    """Base class of every error that a user can cause and cure."""


class ConfigError(RankrlError):
    """An option is unknown, out of its range, or contradicts another option."""


class DataError(RankrlError):
    """A dataset is missing, damaged, or its shapes or labels do not fit."""


class ModelError(RankrlError):
    """A model cannot be built, or is no classifier of the given input and class count."""


class CheckpointError(RankrlError):
    """A checkpoint is missing, damaged, unsafe to read, or made for another network."""


class NonFiniteError(RankrlError):
    """A loss, weight or reward became NaN or infinite; the message names the place."""


class StorageError(RankrlError):
    """A file or folder cannot be read or written (full disk, missing permission, ...)."""


class FolderInUseError(StorageError):
    """Another run goes on in the folder."""


class DefectError(Exception):
    """A result is damaged by a defect of this package; the message says what to report."""


class ExportError(RankrlError):
    """A model cannot become an ONNX file, or its file does not do what the model does."""


class OnnxGraphError(RankrlError):
    """An ONNX file or its inputs cannot be used: damaged, incomplete, or nothing that can be compressed."""
