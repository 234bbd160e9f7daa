"""Channel pruning: learn or compute which channels matter, then remove them physically.

    masked = MaskedNetwork(model, example_input, GroupLassoMask)
    train_masks(masked, batches, loss, MaskTrainingOptions(), cost=macs, target=0.5)
    smaller = masked.removed()

What goes together (`groups`), what matters (`criteria`, the masks) and the surgery (`removal`) are
independent: the surgery takes a plain mapping from layer names to kept output channels, wherever it comes
from.

What it offers is listed in `__init__.pyi` and imported when it is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
