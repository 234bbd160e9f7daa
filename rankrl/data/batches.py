"""Shuffle, augment and normalise images in batches on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rankrl.data.images import Augmentation, Images, check_normalisation, scale_and_offset
from rankrl.errors import ConfigError


def batches(
    images: Images,
    batch_size: int,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | None = None,
    augmentation: Augmentation | None = None,
    generator: torch.Generator | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of batches: normalised images (B, C, H, W), float32, and labels (B,).

    All randomness comes from `generator` and is drawn on the CPU before the first batch, so that equal
    generators give equal batches on every device.
    """
    if not isinstance(images, Images):
        raise TypeError(
            f"expected Images, got {type(images).__name__}; test images choose nothing, use report_accuracy"
        )
    if batch_size < 1:
        raise ConfigError(f"the batch size must be at least 1, got {batch_size}")
    if generator is None and (shuffle or augmentation is not None):
        raise ConfigError("shuffling and augmentation need a torch.Generator, so that a run can be repeated")
    return _walk(images, batch_size, mean, std, device, augmentation, generator, shuffle, drop_last)


def _walk(
    images: Images,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | None,
    augmentation: Augmentation | None,
    generator: torch.Generator | None,
    shuffle: bool,
    drop_last: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    device = images.x.device if device is None else device
    count = len(images)
    order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
    order = order.to(images.x.device)
    crops = (
        augmentation.draw(count, generator).to(device)
        if augmentation is not None and generator is not None
        else None
    )
    check_normalisation(mean, std, images.x.shape[1])
    scale, offset = (tensor.view(1, -1, 1, 1).to(device) for tensor in scale_and_offset(mean, std))
    for start in range(0, count - batch_size + 1 if drop_last else count, batch_size):
        stop = min(start + batch_size, count)
        indices = order[start:stop]
        x = images.x[indices].to(device, non_blocking=True)
        if crops is not None:
            x = crops.part(start, stop).apply(x)
        yield (
            x.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(offset),
            images.y[indices].to(device, non_blocking=True),
        )


def augmented_copy(images: Images, augmentation: Augmentation, seed: int) -> Images:
    """Return a copy with every image randomly cropped and flipped once."""
    generator = torch.Generator().manual_seed(seed)
    crops = augmentation.draw(len(images), generator).to(images.x.device)
    x = torch.empty_like(images.x, memory_format=torch.channels_last)
    for start in range(0, len(images), 1000):  # the gather's index takes 8 bytes a pixel: keep it small
        stop = min(start + 1000, len(images))
        x[start:stop] = crops.part(start, stop).apply(images.x[start:stop])
    return Images(x, images.y)
