"""scikit-learn's bundled handwritten digits: 1,797 grey images of 8x8, no file needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankrl.data.arrays import images_from_arrays
from rankrl.data.augmentation import Augmentation
from rankrl.data.registry import SourceFiles, register_dataset
from rankrl.data.split import stratified_split

_TEST_SHARE = 0.2
_TEST_SEED = 0  # the test set is the same in every run, whatever the run's own seed


@register_dataset(
    "digits",
    "scikit-learn's 1,797 handwritten digits, 1x8x8, 10 classes; needs no file",
    augmentation=Augmentation(padding=1, flip=False),
)
def digits(root: Path) -> SourceFiles:
    """Return the digits with a fixed, stratified fifth as the test set.

    Args:
        root: Not used; the images come with scikit-learn.
    """
    del root
    from sklearn.datasets import load_digits  # takes most of a second, and only this source needs it

    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    images = images_from_arrays(pixels, bunch.target, where="scikit-learn's digits")
    train, test = stratified_split(images.y, round(_TEST_SHARE * len(images)), _TEST_SEED)
    names = tuple("0123456789")
    return SourceFiles(images.subset(train), images.subset(test), len(names), names)
