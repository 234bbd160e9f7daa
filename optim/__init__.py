"""Adam and Adagrad with the semantics of ai.onnx.preview.training, for torch and as ONNX graphs.

`OnnxAdam` and `OnnxAdagrad` are torch optimizers; `build_step_model` writes their step as an ONNX model that
continues a PyTorch run, `optimizer_from_model` reads one back; `create_optimizer` makes any registered
optimizer by name. The functional forms are in `optim.functional`.
"""

from __future__ import annotations

from optim.adagrad import OnnxAdagrad
from optim.adam import OnnxAdam
from optim.base import OnnxOptimizer
from optim.graph import StepNode, build_step_model, optimizer_from_model, read_step_model, step_inputs
from optim.registry import (
    OptimizerRecord,
    create_optimizer,
    list_optimizers,
    optimizer_record,
    register_optimizer,
)
from optim.sgd import sgd
from optim.validation import SparseGradientError

__all__ = [
    "OnnxAdagrad",
    "OnnxAdam",
    "OnnxOptimizer",
    "OptimizerRecord",
    "SparseGradientError",
    "StepNode",
    "build_step_model",
    "create_optimizer",
    "list_optimizers",
    "optimizer_from_model",
    "optimizer_record",
    "read_step_model",
    "register_optimizer",
    "sgd",
    "step_inputs",
]
