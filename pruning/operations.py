"""What the channel walk knows about torch's operations: those that treat every channel on its own.

An operation in one of these tables keeps the channel axis (axis 1) as it is: output channel c depends on
input channel c only. Whatever is in no table is taken to mix channels, and the channels that reach it are
protected: an incomplete table costs compression, never correctness.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

CHANNELWISE_MODULES: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
        *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d),
        *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.Upsample, nn.UpsamplingNearest2d),
    }
)

CHANNELWISE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            F.relu,
            F.relu_,
            torch.relu,
            torch.relu_,
            F.relu6,
            F.leaky_relu,
            F.elu,
            F.celu,
            F.selu,
            F.gelu,
            F.silu,
        ),
        *(F.mish, F.softplus, F.hardswish, F.hardsigmoid, F.hardtanh, F.sigmoid, F.tanh),
        *(torch.sigmoid, torch.tanh, torch.clamp, torch.abs, torch.neg, operator.neg),
        *(F.dropout, F.dropout2d, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool2d),
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
        *(F.adaptive_avg_pool3d, F.interpolate),
    }
)

CHANNELWISE_METHODS: frozenset[str] = frozenset(
    {
        *("relu", "relu_", "sigmoid", "tanh", "clamp", "clamp_", "abs", "neg"),
        *("contiguous", "clone", "detach", "float", "to"),
    }
)

ELEMENTWISE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul),
        *(operator.truediv, operator.itruediv, torch.add, torch.sub, torch.mul, torch.div),
        *(torch.maximum, torch.minimum),
    }
)

ELEMENTWISE_METHODS: frozenset[str] = frozenset(
    {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "maximum", "minimum"}
)

REDUCTION_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset({torch.mean, torch.sum, torch.amax})
REDUCTION_METHODS: frozenset[str] = frozenset({"mean", "sum", "amax"})
CONCATENATIONS: frozenset[Callable[..., Any]] = frozenset({torch.cat, torch.concat})


def pad_arguments(node: fx.Node) -> tuple[list[Any], Any, Any]:
    """Return the widths, mode and value of a traced call of `torch.nn.functional.pad`."""
    names = ("input", "pad", "mode", "value")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return list(given["pad"]), given.get("mode", "constant"), given.get("value")


def spares_channels(dims: Any, ndim: int) -> bool:
    """Say whether a reduction over `dims` leaves the batch and channel axes alone."""
    if dims is None:
        return False
    return all(dim % ndim > 1 for dim in (dims if isinstance(dims, list | tuple) else (dims,)))


def slices_pixels_only(index: Any) -> bool:
    """Say whether an indexing takes all of the batch and channel axes and slices or picks pixels."""
    if not isinstance(index, tuple) or len(index) < 2:
        return False
    return index[:2] == (slice(None), slice(None)) and all(
        isinstance(part, slice | int) for part in index[2:]
    )


def holds_tensor(value: Any) -> bool:
    """Say whether a value is a tensor, or a container with one."""
    if isinstance(value, dict):
        return any(holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
