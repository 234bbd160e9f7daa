"""Reinforcement learning agents on `rankrl.envs.RankSelectionEnv`: stable-baselines3's, as they come."""

from __future__ import annotations

from rankrl.agents.options import AgentOptions
from rankrl.agents.policy_agent import ALGORITHMS, PolicyAgent

__all__ = ["ALGORITHMS", "AgentOptions", "PolicyAgent"]
