"""Factorise weights in tensor formats: as products of small cores."""

from __future__ import annotations

from decomposition.formats import chain, cp, matrices, tucker
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    get_format,
    list_formats,
    register_format,
)

__all__ = [
    "Cores",
    "Ranks",
    "TensorFormat",
    "chain",
    "cp",
    "get_format",
    "list_formats",
    "matrices",
    "register_format",
    "tucker",
]
