"""A PyTorch network's inputs as its ONNX file takes them: arrays by the names of the file's inputs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposition.network.inputs import ExampleInputs, Inputs, random_batch, tensors_of
from rankrl.onnx.runtimes import Batch

ONLY_INPUT = "input"
"""What a file calls the input of a network that takes one tensor."""


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """Return the names of a file's inputs: those of the forward's parameters where there are several."""
    if isinstance(inputs, torch.Tensor):
        return [ONLY_INPUT]
    if isinstance(inputs, dict):
        return list(inputs)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL][
        : len(inputs)
    ]
    return names if len(names) == len(inputs) else [f"{ONLY_INPUT}_{j}" for j in range(len(inputs))]


def feed_of(model: nn.Module, inputs: Inputs) -> Batch:
    """Return a batch as a float32 file takes it: one array, or arrays by name where there are several."""
    arrays = [_array(tensor) for tensor in tensors_of(inputs)]
    if isinstance(inputs, torch.Tensor):
        return arrays[0]
    return dict(zip(input_names(model, inputs), arrays, strict=True))


def random_feed(model: nn.Module, input_shape: ExampleInputs, batch: int) -> Batch:
    """Return a batch that is good for timing: random numbers, and integers that the network takes."""
    return feed_of(model, random_batch(model, input_shape, batch))


def _array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    x = x.detach().cpu().contiguous()
    array: np.ndarray[Any, Any] = (x.float() if x.is_floating_point() else x).numpy()
    return array
