"""The error that the package raises."""

from __future__ import annotations

from rankrl.errors import RankrlError


class OnnxGraphError(RankrlError):
    """An ONNX file or its inputs cannot be used: damaged, incomplete, or nothing that can be compressed."""
