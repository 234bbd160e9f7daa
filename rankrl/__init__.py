"""Make trained convolutional networks small and fast: reinforcement learning chooses the ranks.

    found = rankrl.search(model, score=..., calibration=images, params=0.4)
    small = decomposition.apply_plan(model, found.plan, calibration=images)
    rankrl.export_onnx(small, "small.onnx", (3, 32, 32))

What the package offers is listed in `__init__.pyi` and imported when it is first used. Importing the package
registers the environment `rankrl/RankSelection-v0` with Gymnasium, and with `decomposition` the operations of
plans that come from `pruning`.
"""

from __future__ import annotations

import lazy_loader

from rankrl.registration import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register()
