"""The loss is the published mixture of cross-entropy and distillation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rankrl.training.accuracy import distillation_loss, training_loss

STUDENT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, 3.0]])
TEACHER = torch.tensor([[2.0, -1.0, 0.0], [0.5, 0.2, 1.0]])
LABELS = torch.tensor([0, 2])


@given(temperature=st.floats(0.1, 20))
def test_distillation_is_the_definition_of_the_divergence(temperature: float) -> None:
    p, q = (torch.softmax(scores.double() / temperature, 1) for scores in (TEACHER, STUDENT))
    expected = temperature**2 * (p * (p / q).log()).sum(1).mean()
    assert distillation_loss(STUDENT, TEACHER, temperature).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_student_that_equals_its_teacher_has_no_distillation_loss() -> None:
    assert distillation_loss(TEACHER, TEACHER, 4.0).item() == pytest.approx(0, abs=1e-6)
    # Softmax does not see a constant added to all scores.
    assert distillation_loss(TEACHER + 5, TEACHER, 4.0).item() == pytest.approx(0, abs=1e-5)


@given(mixture=st.floats(0, 1), smoothing=st.floats(0, 0.5))
def test_the_loss_mixes_both_parts(mixture: float, smoothing: float) -> None:
    loss = training_loss(
        STUDENT, LABELS, TEACHER, label_smoothing=smoothing, distillation=mixture, temperature=2.0
    )
    hard = F.cross_entropy(STUDENT, LABELS, label_smoothing=smoothing)
    soft = distillation_loss(STUDENT, TEACHER, 2.0)
    assert loss.item() == pytest.approx(((1 - mixture) * hard + mixture * soft).item(), rel=1e-5)


def test_half_precision_scores_are_summed_in_float32() -> None:
    loss = training_loss(
        STUDENT.bfloat16(),
        LABELS,
        TEACHER.bfloat16(),
        label_smoothing=0.1,
        distillation=0.5,
        temperature=2.0,
    )
    assert loss.dtype == torch.float32
