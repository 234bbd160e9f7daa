"""Score the units of channel groups without training (criteria).

A criterion takes the model, the groups, calibration inputs and a random generator, and returns for each
group's name one score per unit, shape (units,), higher is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pruning.channel_walk import channel_axis
from pruning.copies import fresh_input, plain_network
from pruning.errors import PruningError
from pruning.groups import ChannelGroup
from pruning.registry import register_pruner

ReaderHook = Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...] | None]
Scores = dict[str, torch.Tensor]
Criterion = Callable[[nn.Module, Sequence[ChannelGroup], torch.Tensor | None, torch.Generator | None], Scores]


@register_pruner("first_k", "remove the first k channels of every layer")
def first_k(model: nn.Module, groups: Sequence[ChannelGroup], *_: object) -> Scores:
    """Score units by their number, so that the first ones go first."""
    return {group.name: torch.arange(group.units, dtype=torch.float32) for group in groups}


@register_pruner("random", "remove random channels of every layer")
def random(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    calibration: torch.Tensor | None,
    generator: torch.Generator | None,
) -> Scores:
    """Score units at random, uniform on [0, 1), from `generator` (torch's default one if None)."""
    return {group.name: torch.rand(group.units, generator=generator, dtype=torch.float32) for group in groups}


@register_pruner("magnitude", "remove the filters with the smallest L1 norm")
def magnitude(model: nn.Module, groups: Sequence[ChannelGroup], *_: object) -> Scores:
    """Score units by the L1 norm of their filters (Li et al. 2017), relative to the mean in each layer."""
    return {group.name: _mean_norms(model, group) for group in groups}


@register_pruner("apoz", "remove the channels with the largest share of zero activations")
def apoz(
    model: nn.Module, groups: Sequence[ChannelGroup], calibration: torch.Tensor | None, *_: object
) -> Scores:
    """Score units by their share of activations, as read, that are not zero (Hu et al. 2016, eq. 1)."""
    if calibration is None or len(calibration) == 0:
        raise PruningError(
            "apoz counts zero activations and needs calibration inputs; give a batch of images"
        )
    read: dict[str, torch.Tensor] = {}

    def count(name: str) -> ReaderHook:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            features = inputs[0].movedim(channel_axis(module), 0).flatten(1)
            read[name] = (features != 0).float().mean(1).cpu()

        return hook

    readers = {name for group in groups for name in group.readers}
    with observed(model, {name: count(name) for name in readers}), torch.no_grad():
        plain_network(model)(fresh_input(calibration))
    return {
        group.name: _mean_by_unit(group.units, [(units, read[name]) for name, units in group.readers.items()])
        for group in groups
    }


@contextmanager
def observed(model: nn.Module, hooks: Mapping[str, ReaderHook]) -> Iterator[None]:
    """Put `model` into evaluation mode with hooks on the inputs of some layers, and restore it afterwards."""
    model = plain_network(model)
    modes = {module: module.training for module in model.modules()}
    handles = [model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _mean_norms(model: nn.Module, group: ChannelGroup) -> torch.Tensor:
    rows: list[tuple[tuple[int, ...], torch.Tensor]] = []
    network = plain_network(model)
    for name, units in group.layers.items():
        weight = network.get_submodule(name).weight
        if not isinstance(weight, torch.Tensor):
            raise PruningError(f"layer {name!r} has no weight to measure")
        norms = weight.detach().flatten(1).abs().sum(1).float().cpu()
        rows.append((units, norms / norms.mean().clamp_min(torch.finfo(torch.float32).tiny)))
    return _mean_by_unit(group.units, rows)


def _mean_by_unit(count: int, rows: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    """Average values given per channel over the channels of each unit; a unit of -1 is another group's."""
    total, seen = torch.zeros(2, count + 1, dtype=torch.float32)
    for units, values in rows:
        # Unit -1 maps to an extra last place, which collects the channels of other groups and is dropped.
        index = torch.tensor(units) % (count + 1)
        total.index_add_(0, index, values)
        seen.index_add_(0, index, torch.ones_like(values))
    return (total / seen.clamp_min(1))[:count]
