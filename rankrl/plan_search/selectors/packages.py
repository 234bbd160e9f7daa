"""Packages that single selectors need and that an installation may lack."""

from __future__ import annotations

import importlib
from typing import Any

from rankrl.errors import ConfigError


def import_package(module: str, selector: str, called: str) -> Any:
    """Import the package that a selector needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"selector={selector} needs {called}, which is not installed; `pip install {module}`, or choose "
            "another selector"
        ) from error
