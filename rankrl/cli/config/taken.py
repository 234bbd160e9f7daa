"""Defaults that the configuration takes over from the code, named so that the code need not be imported.

A reference is `MODULE:OWNER.NAME` for a parameter of a class or function or an attribute of an object, and
`MODULE:NAME` for a constant.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from rankrl.cli.config.catalogue import DEFAULTS

REFERENCES: dict[str, Any] = {}
"""Every reference that was asked for, and its default."""


def default_of(reference: str) -> Any:
    """Return what the catalogue knows of a default, or the code where it knows nothing."""
    known = DEFAULTS[reference] if reference in DEFAULTS else live_default(reference)
    REFERENCES[reference] = known
    return known


def live_default(reference: str) -> Any:
    """Import what has the default, and return it."""
    module, _, path = reference.partition(":")
    owner_path, _, name = path.rpartition(".")
    owner = owner_of(f"{module}:{owner_path}" if owner_path else module)
    parameters = inspect.signature(owner).parameters if callable(owner) else {}
    return parameters[name].default if name in parameters else getattr(owner, name)


def owner_of(reference: str) -> Any:
    """Return the object that `MODULE:OWNER` names, or the module `MODULE`."""
    return pkgutil.resolve_name(reference)
