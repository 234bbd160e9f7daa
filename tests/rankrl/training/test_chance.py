"""What guessing reaches, and what counts as no better."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier
from torch import Tensor

from rankrl.training.accuracy import (
    guessing_loss,
    guessing_share,
    is_guessing,
    near_guessing,
    worse_than_guessing,
)

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
