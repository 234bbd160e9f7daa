"""Define, compose and check the configuration: schema, command line, values and paths, earlier runs.

Importing the package registers the schema and the groups with Hydra, which composing needs.
"""

from __future__ import annotations

from rankrl.cli.config.schema import store_groups

store_groups()
