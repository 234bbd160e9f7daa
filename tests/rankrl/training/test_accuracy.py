"""Accuracy counts right, in either precision, and never on test images by mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rankrl.data import ImageData, Images
from rankrl.device import Precision
from rankrl.errors import DataError, NonFiniteError
from rankrl.training import accuracy, predict_logits, report_accuracy

MEAN, STD = (0.0,), (1.0,)


class BrightnessIsClass(nn.Module):
    """The class of an image is its brightness."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, H, W) with values k / 255 to one-hot scores of class k."""
        return nn.functional.one_hot((x.mean((1, 2, 3)) * 255).round().long(), 5).float()


def constant_images(brightness: list[int], labels: list[int]) -> Images:
    x = torch.tensor(brightness, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Images(x, torch.tensor(labels, dtype=torch.int64))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_accuracy_is_the_share_of_right_answers(batch_size: int) -> None:
    images = constant_images([0, 1, 2, 3, 4], [0, 1, 2, 0, 0])
    assert accuracy(BrightnessIsClass(), images, mean=MEAN, std=STD, batch_size=batch_size) == 0.6


def test_scores_are_those_of_the_network_in_evaluation_mode_whose_mode_stays(
    digits: ImageData, make_network: Callable[[int], nn.Module]
) -> None:
    model = make_network(0).train()
    precision = Precision(torch.device("cpu"), torch.float32)
    logits = predict_logits(model, digits.heldout, mean=digits.mean, std=digits.std, precision=precision)
    assert model.training
    mean, std = digits.mean[0], digits.std[0]
    with torch.no_grad():
        expected = model.eval()((digits.heldout.x.float() / 255 - mean) / std)
    torch.testing.assert_close(logits, expected)


def test_test_images_are_only_for_the_report(
    digits: ImageData, make_network: Callable[[int], nn.Module]
) -> None:
    model = make_network(0)
    with pytest.raises(TypeError, match="test images choose nothing"):
        accuracy(model, digits.test, mean=digits.mean, std=digits.std)  # type: ignore[arg-type]
    reported = report_accuracy(model, digits.test, mean=digits.mean, std=digits.std)
    precision = Precision(torch.device("cpu"), torch.float32)
    assert reported == accuracy(
        model, digits.test.for_report(), mean=digits.mean, std=digits.std, precision=precision
    )


def test_scores_that_are_not_finite_are_an_error(
    digits: ImageData, make_network: Callable[[int], nn.Module]
) -> None:
    model = make_network(0)
    nn.init.constant_(model.get_parameter("linear.bias"), float("nan"))
    with pytest.raises(NonFiniteError, match="NaN or infinite for 287 of 287 images, first for image 0"):
        accuracy(model, digits.heldout, mean=digits.mean, std=digits.std)


def test_no_images_have_no_accuracy() -> None:
    with pytest.raises(DataError, match="no images"):
        accuracy(BrightnessIsClass(), constant_images([], []), mean=MEAN, std=STD)
