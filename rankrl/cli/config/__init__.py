"""The configuration: types, groups, folder, the command line's overrides, and what becomes of them.

Importing it registers the types and groups with Hydra, for whoever composes the configuration.
"""

from __future__ import annotations

from rankrl.cli.config import schema
from rankrl.cli.config.choices import store_groups

__all__ = ["schema"]

store_groups()
