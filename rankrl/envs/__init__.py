"""The environment `rankrl/RankSelection-v0`, registered with Gymnasium by importing this package."""

from __future__ import annotations

import gymnasium

from rankrl.envs.actions import ActionKind, ActionMap, create_action_map
from rankrl.envs.rank_selection import RankSelectionEnv, StepInfo

ENVIRONMENT_ID = "rankrl/RankSelection-v0"

if ENVIRONMENT_ID not in gymnasium.registry:
    gymnasium.register(ENVIRONMENT_ID, entry_point="rankrl.envs.rank_selection:RankSelectionEnv")

__all__ = ["ENVIRONMENT_ID", "ActionKind", "ActionMap", "RankSelectionEnv", "StepInfo", "create_action_map"]
