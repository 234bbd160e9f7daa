"""Train stable-baselines3's reinforcement learning agents on `RankSelectionEnv`."""

from __future__ import annotations

import lazy_loader

# Lazy, so that stable-baselines3 is imported with the first agent, not with an agent's options.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
