"""Networks by name: `create_model`, `list_models`, `load_checkpoint`."""

from __future__ import annotations

from rankrl.models import (  # registers the models
    conv4,
    custom,
    lenet5,
    onnx_network,
    resnet,
    resnet9,
    torchvision_models,
)
from rankrl.models.checkpoint import (
    checkpoint_heldout,
    checkpoint_preprocessing,
    load_checkpoint,
    save_checkpoint,
)
from rankrl.models.classifier import check_classifier
from rankrl.models.registry import (
    ModelSource,
    build_model,
    create_model,
    default_lr,
    list_models,
    model_option_types,
    model_source,
    register_model,
)

__all__ = [
    "ModelSource",
    "build_model",
    "check_classifier",
    "checkpoint_heldout",
    "checkpoint_preprocessing",
    "conv4",
    "create_model",
    "custom",
    "default_lr",
    "lenet5",
    "list_models",
    "load_checkpoint",
    "model_option_types",
    "model_source",
    "onnx_network",
    "register_model",
    "resnet",
    "resnet9",
    "save_checkpoint",
    "torchvision_models",
]
