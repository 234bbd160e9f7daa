"""Make trained convolutional networks small and fast: reinforcement learning chooses the ranks.

    found = rankrl.search(model, score=..., calibration=images, params=0.4)
    small = decomposition.apply_plan(model, found.plan, calibration=images)
    rankrl.export_onnx(small, "small.onnx", (3, 32, 32))

Importing the package registers the environment `rankrl/RankSelection-v0` with Gymnasium.
"""

from __future__ import annotations

from rankrl.api import search
from rankrl.envs import RankSelectionEnv
from rankrl.export import export_onnx
from rankrl.workflow.apply import carry_out, load_compressed

__all__ = ["RankSelectionEnv", "carry_out", "export_onnx", "load_compressed", "search"]
