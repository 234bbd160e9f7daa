"""Prune channels: learn or compute which ones matter, then remove them physically.

    masked = MaskedNetwork(model, example_input, GroupLassoMask)
    train_masks(masked, batches, loss, MaskTrainingOptions(), cost=macs, target=0.5)
    smaller = masked.removed()

Dependencies (`groups`), importance (`criteria`, the masks) and surgery (`removal`) are independent: the
surgery takes any mapping from layer names to kept output channels.

The public names are listed in `__init__.pyi` and imported on first use.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
