"""The batched crop equals the crop of one image after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rankrl.data import Augmentation, Images, augmented_copy
from rankrl.errors import ConfigError


@given(
    count=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 3),
    flip=st.booleans(),
    seed=st.integers(0, 100),
)
def test_crops_equal_slicing_each_padded_image(
    count: int, channels: int, height: int, width: int, padding: int, flip: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    crops = Augmentation(padding, flip).draw(count, generator)
    result = crops.apply(x)
    assert result.dtype == torch.uint8
    for image, top, left, mirrored, found in zip(
        x, crops.top.tolist(), crops.left.tolist(), crops.mirrored.tolist(), result, strict=True
    ):
        crop = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
        assert torch.equal(found, crop.flip(2) if mirrored else crop)


def test_every_offset_occurs_and_half_of_the_images_are_mirrored() -> None:
    crops = Augmentation(padding=2, flip=True).draw(5000, torch.Generator().manual_seed(0))
    assert set(crops.top.tolist()) == set(crops.left.tolist()) == set(range(5))
    assert abs(crops.mirrored.double().mean().item() - 0.5) < 0.03


def test_nothing_happens_without_padding_and_flip() -> None:
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    crops = Augmentation(padding=0, flip=False).draw(4, torch.Generator().manual_seed(0))
    assert torch.equal(crops.apply(x), x)


@pytest.mark.parametrize("padding", [-1, 1.5, True])
def test_a_padding_that_is_no_pixel_count_is_refused(padding: float) -> None:
    with pytest.raises(ConfigError, match="padding"):
        Augmentation(padding=padding)  # type: ignore[arg-type]


def test_a_copy_is_augmented_once_keeps_labels_and_follows_its_seed() -> None:
    images = Images(torch.randint(0, 256, (1203, 1, 8, 8), dtype=torch.uint8), torch.arange(1203))
    augmentation = Augmentation(padding=1, flip=True)
    first, again, other = (augmented_copy(images, augmentation, seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert torch.equal(first.y, images.y)
    crops = augmentation.draw(1203, torch.Generator().manual_seed(1))
    assert torch.equal(first.x, crops.apply(images.x))
