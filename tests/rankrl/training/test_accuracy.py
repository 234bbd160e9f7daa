"""Accuracy counts right, in either precision, and never on test images by mistake."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier
from torch import Tensor, nn

from rankrl.data import ImageData, Images
from rankrl.device import Precision
from rankrl.errors import DataError, NonFiniteError
from rankrl.training import accuracy, predict_logits, report_accuracy
from rankrl.training.accuracy import (
    guessing_loss,
    guessing_share,
    is_guessing,
    near_guessing,
    worse_than_guessing,
)

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
def test_accuracy_is_the_share_of_right_answers(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(predict_logits.__globals__, "_BATCH", batch_size)
    images = constant_images([0, 1, 2, 3, 4], [0, 1, 2, 0, 0])
    assert accuracy(BrightnessIsClass(), images, mean=MEAN, std=STD) == 0.6


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


LABELS = st.lists(st.integers(0, 5), min_size=2, max_size=60).map(torch.tensor)


@given(LABELS)
def test_guessing_is_what_a_constant_classifier_reaches(labels: Tensor) -> None:
    constant = DummyClassifier(strategy="most_frequent").fit(labels[:, None], labels)
    assert guessing_share(labels) == pytest.approx(constant.score(labels[:, None], labels))


@given(LABELS)
def test_no_constant_scores_have_a_smaller_loss(labels: Tensor) -> None:
    counts = torch.bincount(labels).double()
    best = (counts / counts.sum()).log().expand(len(labels), -1)
    assert guessing_loss(labels) == pytest.approx(float(F.cross_entropy(best, labels)), abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(len(counts), generator=generator, dtype=torch.float64).expand(len(labels), -1)
    assert float(F.cross_entropy(other, labels)) >= guessing_loss(labels) - 1e-9


@pytest.mark.parametrize(
    ("accuracy", "share", "images", "near"),
    [
        (0.114, 0.112, 5000, True),  # one answer to all of MNIST
        (0.145, 0.1, 5000, True),
        (0.16, 0.1, 5000, False),
        (0.02, 0.01, 5000, False),  # twice what guessing reaches of 100 classes
        (0.014, 0.01, 5000, True),
        (0.16, 0.1, 100, True),  # within the noise of so few images
        (0.52, 0.5, 10_000, True),
        (0.55, 0.5, 10_000, False),
        (0.92, 0.9, 10_000, False),
        (0.9, 0.9, 10_000, True),
        (0.03, 0.1, 5000, True),  # worse than guessing
        (1.0, 0.1, 5, False),
    ],
)
def test_accuracies_near_guessing(accuracy: float, share: float, images: int, near: bool) -> None:
    assert near_guessing(accuracy, share, images) == near


def test_an_epoch_of_guessing_has_both_signs() -> None:
    labels = torch.arange(1000) % 10
    assert is_guessing(0.1, 2.3026, labels, 1000)
    assert is_guessing(0.05, 80.0, labels, 1000)
    assert not is_guessing(0.15, 2.3, labels, 1000)  # slow to begin
    rare = (torch.arange(1000) % 10 == 0).long()
    assert not is_guessing(0.9, 0.2, rare, 1000)  # only one class is answered, ever more surely
    assert is_guessing(0.9, 0.33, rare, 1000)
    assert worse_than_guessing(2.34, labels)
    assert not worse_than_guessing(2.304, labels)  # the plateau of a network that is slow to begin
    assert not is_guessing(1.0, 0.0, torch.zeros(1000, dtype=torch.int64), 1000)  # nothing to guess
