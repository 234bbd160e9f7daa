"""Make trained convolutional networks small and fast: reinforcement learning chooses the ranks.

    found = rankrl.search(model, score=..., calibration=images, params=0.4)
    small = decomposition.apply_plan(model, found.plan, calibration=images)
    rankrl.export_onnx(small, "small.onnx", (3, 32, 32))

Importing the package registers the environment `rankrl/RankSelection-v0` with Gymnasium, and with
`decomposition` the operations of plans that come from `pruning`.
"""

from __future__ import annotations

from decomposition import apply_plan, load_compressed
from rankrl.api import search
from rankrl.envs import RankSelectionEnv
from rankrl.export import export_onnx
from rankrl.operations import KeepChannels

__all__ = ["KeepChannels", "RankSelectionEnv", "apply_plan", "export_onnx", "load_compressed", "search"]
