"""Define the environment `rankrl/RankSelection-v0`; importing `rankrl` registers it with Gymnasium."""

from __future__ import annotations

from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv
from rankrl.registration import ENVIRONMENT_ID

__all__ = ["ENVIRONMENT_ID", "RankSelectionEnv", "create_action_map"]
