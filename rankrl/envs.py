"""The environment `rankrl/RankSelection-v0` under its public name; it lives in `rankrl.plan_search.envs`."""

from __future__ import annotations

from rankrl.plan_search.envs import ENVIRONMENT_ID, RankSelectionEnv

__all__ = ["ENVIRONMENT_ID", "RankSelectionEnv"]
