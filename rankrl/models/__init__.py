"""Create networks by name and load their weights: `create_model`, `list_models`, `load_checkpoint`."""

from __future__ import annotations

from rankrl.models import custom
from rankrl.models import custom as onnx_network
from rankrl.models import custom as torchvision_models
from rankrl.models import zoo as conv4
from rankrl.models import zoo as lenet5
from rankrl.models import zoo as resnet
from rankrl.models import zoo as resnet9
from rankrl.models.checkpoint import (
    checkpoint_heldout,
    checkpoint_preprocessing,
    load_checkpoint,
    save_checkpoint,
)
from rankrl.models.classifiers import (
    ModelSource,
    build_model,
    check_classifier,
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
