"""Pixels of more than 8 bits, in 8: divided by what their type can hold, where that is known."""

from __future__ import annotations

import numpy as np
from PIL import Image

_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
"""Tags of TIFF 6.0, sections 8 and 3."""
_SCALED_TO_16_BITS = ("PNG", "PPM")
"""Formats of which Pillow hands whole numbers in 32 bits that go up to 65535."""


def eight_bits(image: Image.Image) -> Image.Image:
    """Return an image whose channels have 8 bits at most: shades of grey of 16 bits or in floats scaled to 8.

    Pillow's own `convert` cuts such shades off at 255. What has several channels it scales as it opens it.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # also true of NaN
            raise ValueError(
                f"its pixels are floating-point numbers from {low:g} to {high:g}, of which nobody knows what "
                "white is; scale them to [0, 1]"
            )
        white = 1
    elif image.mode.startswith("I;16"):
        white = 2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
    elif image.format in _SCALED_TO_16_BITS:
        white = 2**16 - 1
    else:
        raise ValueError(
            "its pixels are whole numbers of 32 bits or with a sign, of which nobody knows what white is; "
            "store them in 8 or 16 bits without a sign"
        )
    scaled = np.rint(values * (255 / white)).astype(np.uint8)
    return Image.fromarray(255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled)
