"""The optimizer's step of fine-tuning as an ONNX graph in a file of its own."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from optim import build_step_model
from optim.base import OnnxOptimizer
from rankrl.errors import ConfigError
from rankrl.files import write_atomically
from rankrl.training import TrainingRecipe
from rankrl.training.optimizer import build_optimizer


def write_training_step(network: nn.Module, recipe: TrainingRecipe, path: Path) -> None:
    """Write one step of the recipe's optimizer over the network's parameters, under their own names.

    Inputs and outputs are those of `optim.build_step_model`: learning rate, update count, parameters,
    gradients and accumulators in; parameters and accumulators out.
    """
    optimizer = build_optimizer(network, recipe)
    if not isinstance(optimizer, OnnxOptimizer):
        raise ConfigError(
            "export.training=true writes the optimizer's step as an ONNX operator, and "
            f"{recipe.optimizer!r} is none; use optim=onnx_adam or optim=onnx_adagrad"
        )
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    write_atomically(path, build_step_model(optimizer).SerializeToString())
