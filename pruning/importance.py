"""Criteria: functions that score the units of a channel group without training.

A criterion takes the model, the group, calibration inputs and a random generator, and returns one score per
unit, shape (units,), higher is better. Only the order within a group has a meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pruning.errors import PruningError
from pruning.groups import ChannelGroup
from pruning.registry import register_pruner

Criterion = Callable[[nn.Module, ChannelGroup, torch.Tensor | None, torch.Generator | None], torch.Tensor]


@register_pruner("first_k", "remove the first k channels of every layer")
def first_k(
    model: nn.Module, group: ChannelGroup, calibration: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Score units by their number, so that the first ones go first."""
    return torch.arange(group.units, dtype=torch.float32)


@register_pruner("random", "remove random channels of every layer")
def random(
    model: nn.Module, group: ChannelGroup, calibration: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Score units at random, uniform on [0, 1), from `generator` (torch's default one if None)."""
    return torch.rand(group.units, generator=generator)


@register_pruner("magnitude", "remove the filters with the smallest L1 norm")
def magnitude(
    model: nn.Module, group: ChannelGroup, calibration: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Score units by the L1 norm of their filters (Li et al. 2017), relative to the mean norm in each layer.

    A unit with filters in several layers, as in a residual stream, scores their mean.
    """
    rows: list[tuple[tuple[int, ...], torch.Tensor]] = []
    for name, units in group.layers.items():
        weight = model.get_submodule(name).weight
        if not isinstance(weight, torch.Tensor):
            raise PruningError(f"layer {name!r} has no weight to measure")
        norms = weight.detach().flatten(1).abs().sum(1).float().cpu()
        rows.append((units, norms / norms.mean().clamp_min(torch.finfo(torch.float32).tiny)))
    return _mean_by_unit(group.units, rows)


@register_pruner("apoz", "remove the channels with the largest share of zero activations")
def apoz(
    model: nn.Module, group: ChannelGroup, calibration: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Score units by their share of activations that are not zero, 1 - APoZ (Hu et al. 2016, eq. 1).

    Activations are counted where they are read: after the activation function, and after a pooling if there
    is one. The model runs once, in evaluation mode, on `calibration` (a batch of its inputs).

    Raises:
        PruningError: if there are no calibration inputs.
    """
    if calibration is None or len(calibration) == 0:
        raise PruningError(
            "apoz counts zero activations and needs calibration inputs; give a batch of images"
        )
    rows: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def counter(units: tuple[int, ...]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            features = inputs[0].detach().transpose(0, 1).flatten(1)
            rows.append((units, (features != 0).float().mean(1).cpu()))

        return count

    modes = {module: module.training for module in model.modules()}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(counter(units))
        for name, units in group.readers.items()
    ]
    try:
        with torch.no_grad():
            model.eval()(calibration)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return _mean_by_unit(group.units, rows)


def _mean_by_unit(count: int, rows: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    """Average values given per channel over the channels of each unit; a unit of -1 is another group's."""
    total, seen = torch.zeros(count + 1), torch.zeros(count + 1)
    for units, values in rows:
        # Position -1 is the extra last place, where channels of other groups are gathered and dropped.
        index = torch.tensor(units) % (count + 1)
        total.index_add_(0, index, values)
        seen.index_add_(0, index, torch.ones_like(values))
    return (total / seen.clamp_min(1))[:count]
