"""Factorise weights in tensor formats: as products of small cores."""

from __future__ import annotations

import importlib
import pkgutil

from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    get_format,
    list_formats,
    register_format,
)

__all__ = ["Cores", "Ranks", "TensorFormat", "get_format", "list_formats", "register_format"]

for _module in pkgutil.iter_modules(__path__):  # each registers the formats it holds
    importlib.import_module(f"{__name__}.{_module.name}")
