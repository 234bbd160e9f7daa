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
"""What a file calls an input that the forward has no name for."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """Return the names of a file's inputs: those of the forward's parameters, if no weight is called so."""
    count = len(tensors_of(inputs))
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [each.name for each in parameters if each.kind in _POSITIONAL]
    names = list(inputs) if isinstance(inputs, dict) else positional[:count]
    return names if len(names) == count and not set(names) & set(model.state_dict()) else plain_names(count)


def plain_names(count: int) -> list[str]:
    """Return what inputs are called of which nothing else is known."""
    return [ONLY_INPUT] if count == 1 else [f"{ONLY_INPUT}_{index}" for index in range(count)]


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
