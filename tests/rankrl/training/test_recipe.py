"""A recipe refuses what cannot be meant."""

from __future__ import annotations

import pytest

from rankrl.errors import ConfigError
from rankrl.training import TrainingRecipe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"epochs": 1.5}, "epochs"),
        ({"batch_size": True}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"halvings": -1}, "halvings must be a whole number >= 0"),
        ({"lr": 0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"lr": float("inf")}, "lr"),
        ({"lr": "fast"}, "lr must be positive, got 'fast'"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"gradient_clip": 0.0}, "gradient_clip"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"distillation": 1.1}, "distillation must be between 0 and 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"early_stop_patience": 0}, "early_stop_patience"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"optimizer_options": {"lr": 1.0}}, "give the learning rate as lr"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingRecipe(**options)  # type: ignore[arg-type]
