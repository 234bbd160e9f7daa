"""Train and fine-tune networks: `train` by a `TrainingRecipe`, measure the `accuracy`."""

from __future__ import annotations

from rankrl.training.accuracy import accuracy, guessing_share, near_guessing, predict_logits, report_accuracy
from rankrl.training.epochs import EpochRow, TrainingProgress, TrainingResult
from rankrl.training.loop import Loss, check_loss, train, train_on
from rankrl.training.recipe import TrainingRecipe, list_schedules

__all__ = [
    "EpochRow",
    "Loss",
    "TrainingProgress",
    "TrainingRecipe",
    "TrainingResult",
    "accuracy",
    "check_loss",
    "guessing_share",
    "list_schedules",
    "near_guessing",
    "predict_logits",
    "report_accuracy",
    "train",
    "train_on",
]
