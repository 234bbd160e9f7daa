"""The input patches that a layer multiplies with its weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from decomposition.network.kinds import DecomposableModule

if TYPE_CHECKING:
    from decomposition.network.geometry import Geometry


def padded_input(module: nn.Conv1d | nn.Conv2d | Geometry, x: torch.Tensor) -> torch.Tensor:
    """Pad `x` (N, C, *spatial) the way the convolution does, whatever its padding and padding mode."""
    spatial = len(module.kernel_size)
    if module.padding == "valid":
        return x
    if isinstance(module.padding, str):  # 'same': the surplus element goes to the end
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before_after = [(total // 2, total - total // 2) for total in totals]
    else:
        before_after = [(p, p) for p in module.padding]
    widths = [width for pair in reversed(before_after[:spatial]) for width in pair]
    if not any(widths):
        return x
    return F.pad(x, widths, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def patch_view(module: nn.Conv1d | nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """View a padded input as patches, without copying.

    Shapes: x (N, C, *spatial); returns (N, *output spatial, C, *kernel).
    """
    spatial = len(module.kernel_size)
    outputs = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    ]
    strides = x.stride()
    steps = [strides[2 + j] * module.stride[j] for j in range(spatial)]
    taps = [strides[2 + j] * module.dilation[j] for j in range(spatial)]
    return x.as_strided(
        (x.shape[0], *outputs, x.shape[1], *module.kernel_size), (strides[0], *steps, strides[1], *taps)
    )


def sample_labelled_patches(
    module: DecomposableModule, inputs: list[torch.Tensor], count: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw the same random patches from several inputs of one layer, and tell where they are from."""
    linear = isinstance(module, nn.Linear)
    views = [
        x.reshape(-1, x.shape[-1])
        if isinstance(module, nn.Linear)
        else patch_view(module, padded_input(module, x))
        for x in inputs
    ]
    positions = views[0].shape[:1] if linear else views[0].shape[: 1 + len(module.kernel_size)]  # type: ignore[arg-type]
    total = positions.numel()
    patches_per_input = max(1, total // max(1, len(inputs[0])))
    if total <= count:
        labels = torch.arange(total, device=views[0].device) // patches_per_input
        columns = math.prod(views[0].shape[len(positions) :])
        return [view.reshape(total, columns) for view in views], labels
    drawn = torch.randint(total, (count,), generator=generator).to(views[0].device)
    order = drawn.argsort()  # neighbours share lines of the cache, so they are read one after the other
    index, places = torch.unravel_index(drawn[order], positions), order.argsort()
    patches = [view[index].reshape(count, -1).index_select(0, places) for view in views]
    return patches, drawn // patches_per_input


def labels_of_batch(labels: torch.Tensor, axis: int, batch: int) -> torch.Tensor:
    """Return which input each patch is from."""
    return labels // (axis // batch) if axis and axis % batch == 0 else labels
