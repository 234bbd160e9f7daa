"""Compress trained convolutional networks, with ranks chosen by reinforcement learning.

    result = rankrl.compress(model, images, "runs/small", params=0.4)
    result = rankrl.compress("net.onnx", "inputs.npz", "small.onnx", latency=0.5)

Public names are listed in `__init__.pyi` and imported on first use. Importing the package registers the
environment `rankrl/RankSelection-v0` with Gymnasium, and with `decomposition` the operations of plans that
come from `pruning`.
"""

from __future__ import annotations

import lazy_loader

from rankrl.registration import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register()
