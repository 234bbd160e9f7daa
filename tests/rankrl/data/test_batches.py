"""A walk meets every image once, normalised, and follows from its generator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankrl.data import Augmentation, Images, TestImages, batches
from rankrl.errors import ConfigError, DataError


def make(count: int, channels: int = 3) -> Images:
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(0, 256, (count, channels, 5, 4), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(count))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MEAN, STD = (0.1, 0.5, 0.9), (0.2, 1.0, 0.3)


@given(count=st.integers(1, 30), size=st.integers(1, 12), shuffle=st.booleans(), drop_last=st.booleans())
def test_every_image_comes_once_beside_its_label(
    count: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    images = make(count)
    walk = list(
        batches(images, size, mean=MEAN, std=STD, generator=generator(), shuffle=shuffle, drop_last=drop_last)
    )
    labels = [label for _, y in walk for label in y.tolist()]
    assert len(labels) == (count // size * size if drop_last else count)
    assert len(set(labels)) == len(labels)
    if not shuffle:
        assert labels == list(range(len(labels)))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    for x, y in walk:
        assert x.dtype == torch.float32
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert len(x) == len(y) <= size
        for image, label in zip(x, y, strict=True):
            torch.testing.assert_close(image, (images.x[label].float() / 255 - mean) / std)


def test_equal_generators_give_equal_batches_and_the_next_epoch_differs() -> None:
    def walk(source: torch.Generator) -> torch.Tensor:
        walked = batches(
            make(40),
            16,
            mean=MEAN,
            std=STD,
            augmentation=Augmentation(1, True),
            generator=source,
            shuffle=True,
        )
        return torch.cat([x for x, _ in walked])

    source = generator(5)
    first, second = walk(source), walk(source)
    assert torch.equal(first, walk(generator(5)))
    assert not torch.equal(first, second)


def test_test_images_are_refused() -> None:
    with pytest.raises(TypeError, match="TestImages; test images choose nothing"):
        batches(TestImages(make(3)), 1, mean=MEAN, std=STD)  # type: ignore[arg-type]


def test_what_cannot_be_walked_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch size must be at least 1, got 0"):
        batches(make(3), 0, mean=MEAN, std=STD)
    with pytest.raises(ConfigError, match="Generator"):
        batches(make(3), 1, mean=MEAN, std=STD, shuffle=True)
    with pytest.raises(DataError, match="mean has 1 value but the images have 3 channels"):
        next(batches(make(3), 1, mean=(0.5,), std=STD))
    with pytest.raises(DataError, match="std must be positive"):
        next(batches(make(3), 1, mean=MEAN, std=(1.0, 0.0, 1.0)))
