"""Images are checked once, and test images cannot be taken for others."""

from __future__ import annotations

import pytest
import torch

from rankrl.data import Images, TestImages
from rankrl.errors import DataError


def make(count: int = 6) -> Images:
    x = torch.arange(count * 2 * 3 * 4, dtype=torch.uint8).reshape(count, 2, 3, 4)
    return Images(x, torch.arange(count))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\(N, C, H, W\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64), r"\(N,\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "2 images but 3"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.tensor([-1]), "from 0 on, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Images(x, y)


def test_a_subset_holds_the_chosen_images_in_order() -> None:
    images = make()
    subset = images.subset(torch.tensor([4, 1]))
    assert torch.equal(subset.x, images.x[[4, 1]])
    assert subset.y.tolist() == [4, 1]
    assert len(images.subset(torch.tensor([], dtype=torch.int64))) == 0


def test_test_images_show_their_pixels_only_on_request() -> None:
    images = make()
    test = TestImages(images)
    assert not isinstance(test, Images)
    assert not hasattr(test, "x")
    assert len(test) == len(images)
    assert test.for_report() is images
