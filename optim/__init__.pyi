from .graph import StepNode, build_step_model, optimizer_from_model, read_step_model, step_inputs
from .kernels import SparseGradientError
from .optimizers import OnnxAdagrad, OnnxAdam, OnnxOptimizer, sgd
from .registry import (
    OptimizerRecord,
    create_optimizer,
    list_optimizers,
    optimizer_record,
    register_optimizer,
)

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
