"""Tensor formats: how a weight is written as a product of small cores."""

from __future__ import annotations

from decomposition.formats import chain, cp, pifa, spatial_svd, tucker
from decomposition.formats.base import Cores, Ranks, TensorFormat, get_format, list_formats, register_format

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
