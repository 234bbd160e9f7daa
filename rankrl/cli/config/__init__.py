"""Define, compose and check the configuration: types, groups, overrides, input files, resumed runs.

Importing the package registers the types and groups with Hydra, which composing needs.
"""

from __future__ import annotations

from rankrl.cli.config import schema
from rankrl.cli.config.choices import store_groups

__all__ = ["schema"]

store_groups()
