"""Decompose the weights of trained networks into small cores, fitted to data.

    specs = compressible_layers(model, (3, 32, 32))
    plan = make_plan(model, (3, 32, 32), "tensor_ring", ranks=8)
    small = apply_plan(model, plan, calibration=images)

The package depends on torch, not on rankrl, and can be used alone. Its public names are listed in
`__init__.pyi` and imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
