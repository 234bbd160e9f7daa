"""The training loss: cross-entropy, mixed with distillation from a teacher."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 * KL(teacher || student) of the softened probabilities (Hinton et al. 2015, section 2).

    The factor T^2 keeps the gradient's size independent of the temperature.

    Shapes: student (N, classes), teacher (N, classes).
    """
    divergence = F.kl_div(
        F.log_softmax(student.float() / temperature, dim=1),
        F.log_softmax(teacher.float() / temperature, dim=1),
        log_target=True,
        reduction="batchmean",
    )
    return divergence * temperature**2


def training_loss(
    student: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    *,
    label_smoothing: float,
    distillation: float,
    temperature: float,
) -> Tensor:
    """Return (1 - m) * cross-entropy + m * distillation, with m = `distillation`.

    Shapes: student (N, classes), labels (N,), teacher (N, classes).
    """
    loss = F.cross_entropy(student.float(), labels, label_smoothing=label_smoothing)
    if teacher is None:
        return loss
    return (1 - distillation) * loss + distillation * distillation_loss(student, teacher, temperature)
