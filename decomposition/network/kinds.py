"""The kinds of modules that have weights."""

from __future__ import annotations

from typing import Literal, TypeGuard

import torch
from torch import nn

from decomposition.network.opaque import OpaqueKind

Kind = (
    Literal[
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"
    ]
    | OpaqueKind
)
DecomposableModule = nn.Conv1d | nn.Conv2d | nn.Linear
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm
ListedModule = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed | nn.Linear

DECOMPOSABLE = (nn.Conv1d, nn.Conv2d, nn.Linear)
KINDS: dict[type[nn.Module], Kind] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Linear: "linear",
}


def is_decomposable_module(module: nn.Module) -> TypeGuard[DecomposableModule]:
    """Tell whether `module` is exactly a Conv1d, Conv2d or Linear (subclasses may mean something else)."""
    return type(module) in DECOMPOSABLE


def weight_of(module: DecomposableModule) -> torch.Tensor:
    """Return a layer's weight as float64 (out, in, kernel) on the CPU."""
    weight = module.weight.detach()
    return weight.double().cpu().reshape(weight.shape[0], weight.shape[1], -1)
