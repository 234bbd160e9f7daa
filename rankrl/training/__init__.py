"""Training and fine-tuning: `train` a network by a `TrainingRecipe`, measure its `accuracy`."""

from __future__ import annotations

from rankrl.training.accuracy import accuracy, predict_logits, report_accuracy
from rankrl.training.loop import TrainingProgress, TrainingResult, train
from rankrl.training.recipe import TrainingRecipe
from rankrl.training.schedule import list_schedules
from rankrl.training.state import EpochRow

__all__ = [
    "EpochRow",
    "TrainingProgress",
    "TrainingRecipe",
    "TrainingResult",
    "accuracy",
    "list_schedules",
    "predict_logits",
    "report_accuracy",
    "train",
]
