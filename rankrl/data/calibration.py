"""Draw the training images that layers are fitted on."""

from __future__ import annotations

import torch
from torch import Tensor

from rankrl.data import ImageData, Images, batches
from rankrl.data.sample import augmented_copy
from rankrl.options.tasks import check_calibration

CALIBRATION_BATCH = 256
"""Inputs that pass through a network at a time."""


def calibration_images(data: ImageData, count: int, *, seed: int, augmented: bool = False) -> Tensor:
    """Draw normalised training images (count, C, H, W), float32, for fitting layers."""
    check_calibration(count)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    images: Images = data.train.subset(order[:count])
    if augmented and data.augmentation is not None:
        images = augmented_copy(images, data.augmentation, seed)
    walk = batches(images, CALIBRATION_BATCH, mean=data.mean, std=data.std)
    return torch.cat([x for x, _ in walk])
