"""What other packages are told of this one when it is imported, before anything of it is needed."""

from __future__ import annotations

import gymnasium

from decomposition.registry import announce

ENVIRONMENT_ID = "rankrl/RankSelection-v0"


def register() -> None:
    """Register the environment with Gymnasium, and announce the operations to `decomposition`."""
    announce("operation", "rankrl.operations")
    if ENVIRONMENT_ID not in gymnasium.registry:
        gymnasium.register(
            ENVIRONMENT_ID, entry_point="rankrl.plan_search.envs.rank_selection:RankSelectionEnv"
        )
