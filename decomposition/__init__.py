"""Tensor decompositions of trained networks, fitted to data.

    specs = compressible_layers(model, (3, 32, 32))
    plan = make_plan(model, (3, 32, 32), "tensor_ring", ranks=8)
    small = apply_plan(model, plan, calibration=images)

The package knows torch and nothing of rankrl: it can be used alone. What it offers is listed in
`__init__.pyi` and imported when it is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
