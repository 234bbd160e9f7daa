"""Re-export the environment `rankrl/RankSelection-v0` of `rankrl.plan_search.envs` under its public name."""

from __future__ import annotations

from rankrl.plan_search.envs import ENVIRONMENT_ID, RankSelectionEnv

__all__ = ["ENVIRONMENT_ID", "RankSelectionEnv"]
