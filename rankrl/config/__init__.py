"""The configuration: types, groups, folder, the command line's overrides, and what becomes of them.

Importing it registers the types and groups with Hydra, for whoever composes the configuration.
"""

from __future__ import annotations

from rankrl.config import groups, schema

__all__ = ["groups", "schema"]
