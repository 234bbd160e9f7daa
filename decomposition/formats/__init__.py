"""Factorise weights in tensor formats: as products of small cores."""

from __future__ import annotations

from decomposition.formats import chain, cp, tucker
from decomposition.formats import matrices as pifa
from decomposition.formats import matrices as spatial_svd
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
    "pifa",
    "register_format",
    "spatial_svd",
    "tucker",
]
