"""Reinforcement learning agents on `rankrl.envs.RankSelectionEnv`: stable-baselines3's, as they come."""

from __future__ import annotations

import lazy_loader

# stable-baselines3 is imported with the first agent, not with the options of one.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
