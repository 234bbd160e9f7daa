"""Define the errors of exports and of ONNX files."""

from __future__ import annotations

from rankrl.errors import RankrlError


class ExportError(RankrlError):
    """A model cannot become an ONNX file, or its file does not do what the model does."""


class OnnxGraphError(RankrlError):
    """An ONNX file or its inputs cannot be used: damaged, incomplete, or nothing that can be compressed."""
