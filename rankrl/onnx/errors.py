"""The error that the export package raises."""

from __future__ import annotations

from rankrl.errors import RankrlError


class ExportError(RankrlError):
    """A model cannot become an ONNX file, or its file does not do what the model does."""
