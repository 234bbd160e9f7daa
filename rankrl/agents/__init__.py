"""Reinforcement learning agents on `rankrl.envs.RankSelectionEnv`."""

from __future__ import annotations

from rankrl.agents.agent import Episode, RankAgent
from rankrl.agents.algorithms import ALGORITHMS
from rankrl.agents.options import AgentOptions

__all__ = ["ALGORITHMS", "AgentOptions", "Episode", "RankAgent"]
