"""Create networks by name and load their weights: `create_model`, `list_models`, `load_checkpoint`."""

from __future__ import annotations

from rankrl.models import zoo
from rankrl.models.classifiers import (
    build_model,
    check_classifier,
    checkpoint_heldout,
    checkpoint_preprocessing,
    create_model,
    default_lr,
    list_models,
    load_checkpoint,
    model_source,
    register_model,
    save_checkpoint,
)

__all__ = [
    "build_model",
    "check_classifier",
    "checkpoint_heldout",
    "checkpoint_preprocessing",
    "create_model",
    "default_lr",
    "list_models",
    "load_checkpoint",
    "model_source",
    "register_model",
    "save_checkpoint",
    "zoo",
]
