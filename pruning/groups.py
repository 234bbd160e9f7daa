"""Find channel groups: units that can be removed, each with every channel that must go with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pruning.channel_walk import ChannelWalk, Labels
from pruning.copies import public_call
from pruning.errors import PruningError
from pruning.tracing import walk_channels

KeptChannels = dict[str, list[int]]
"""A pruning decision: for each convolution and linear layer, the sorted output channels to keep."""


@dataclass(frozen=True)
class ChannelGroup:
    """Layers whose output channels can only be removed together, unit by unit.

    A block-interior convolution is a group of its own, with one unit per channel. All layers that add into
    one residual stream form one group; where an option-A shortcut widens the stream, a unit of the narrow
    stage is also one of the wide stage.

    Attributes:
        name: the first layer of the group in order of execution.
        units: how many units can be removed independently.
        layers: for each producing layer, the unit of each of its output channels.
        readers: for each layer that reads the group, the unit of each of its input channels (or input
            features), -1 where the channel belongs to another group.
        norms: for each layer or RMS norm that normalises channels of the group together, the unit of each of
            them, as for readers.
        obstacle: why no unit of the group may be removed, or None.
    """

    name: str
    units: int
    layers: Mapping[str, tuple[int, ...]]
    readers: Mapping[str, tuple[int, ...]]
    obstacle: str | None = None
    norms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def kept(self, units: torch.Tensor) -> KeptChannels:
        """Translate kept units into kept output channels.

        Args:
            units: boolean, shape (units,), True where the unit stays.

        Returns:
            For each layer of the group, the sorted list of output channels that stay.
        """
        staying = units.tolist()
        return {
            name: [channel for channel, unit in enumerate(row) if staying[unit]]
            for name, row in self.layers.items()
        }

    def units_of(self, kept: Mapping[str, Sequence[int]]) -> torch.Tensor:
        """Translate kept output channels, as `kept` returns them, back into kept units (boolean)."""
        units = torch.zeros(self.units, dtype=torch.bool)
        for name, row in self.layers.items():
            units[[row[channel] for channel in kept[name]]] = True
        return units

    def spare(self, units: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Reopen the best unit of every layer that would lose all its channels.

        Args:
            units: boolean, shape (units,), True where the unit stays.
            scores: shape (units,), higher is better.

        Returns:
            Boolean, shape (units,): `units` with the fewest additions that leave each layer a channel.
        """
        spared = units.clone()
        staying = units.tolist()
        for row in self.layers.values():
            if not any(staying[unit] for unit in row):
                members = torch.tensor(row, device=units.device)
                best = int(members[scores[members].argmax()])
                spared[best] = staying[best] = True
        return spared

    def __str__(self) -> str:
        layers = ", ".join(f"{name} ({len(row)})" for name, row in self.layers.items())
        state = f"; stays: {self.obstacle}" if self.obstacle else ""
        return f"{self.units} units of {layers}; read by {', '.join(self.readers) or 'nothing'}{state}"


@public_call
def channel_groups(model: nn.Module, example_input: torch.Tensor) -> list[ChannelGroup]:
    """Return every channel group of a network, in order of execution, removable or not.

    Args:
        model: a network of one tensor input.
        example_input: a batch that it accepts, channels on axis 1.

    Raises:
        PruningError: if the network cannot be followed, see `walk_channels`.
    """
    return groups_of_walk(walk_channels(model, example_input))


def groups_of_walk(walk: ChannelWalk) -> list[ChannelGroup]:
    """Collect the channel groups that a channel walk has found."""
    roots = {name: walk.labels.roots(labels) for name, labels in walk.producers.items()}
    readers = {name: walk.labels.roots(labels) for name, labels in walk.readers.items()}
    norms = {name: walk.labels.roots(labels) for name, labels in walk.joint_norms.items()}
    groups = []
    for layers in _coupled_layers(roots):
        units = {
            root: unit for unit, root in enumerate(dict.fromkeys(r for name in layers for r in roots[name]))
        }
        obstacles = [walk.labels.obstacle(root) for root in units]
        normalised = _rows_of(units, norms)
        obstacles += [
            f"{name!r} normalises its channels together with those of others"
            for name, row in normalised.items()
            if -1 in row
        ]
        groups.append(
            ChannelGroup(
                name=layers[0],
                units=len(units),
                layers={name: tuple(units[root] for root in roots[name]) for name in layers},
                readers=_rows_of(units, readers),
                norms=normalised,
                obstacle=next((obstacle for obstacle in obstacles if obstacle), None),
            )
        )
    return groups


def _rows_of(units: Mapping[int, int], roots: Mapping[str, Labels]) -> dict[str, tuple[int, ...]]:
    """Return, for each layer with channels of the group, their units; -1 for other groups' channels."""
    return {
        name: tuple(units.get(root, -1) for root in row)
        for name, row in roots.items()
        if any(root in units for root in row)
    }


@public_call
def removable_groups(
    groups: Sequence[ChannelGroup], layers: Sequence[str] | None = None
) -> list[ChannelGroup]:
    """Return the groups that can be pruned, or those of the named layers.

    Args:
        groups: the groups of a network.
        layers: names of layers whose groups are wanted; None for every group without an obstacle.

    Raises:
        PruningError: if a named layer is no convolution or linear layer of the network, or cannot be pruned;
            or if nothing can.
    """
    if layers is None:
        prunable = [group for group in groups if group.obstacle is None]
        if not prunable:
            reasons = "; ".join(f"{group.name!r}: {group.obstacle}" for group in groups[:5])
            raise PruningError(
                f"no layer can be pruned ({reasons or 'no convolution or linear layer was found'})"
            )
        return prunable
    names = {find_group(groups, layer).name for layer in layers}
    for layer in layers:
        obstacle = find_group(groups, layer).obstacle
        if obstacle is not None:
            raise PruningError(f"layer {layer!r} cannot be pruned: {obstacle}")
    return [group for group in groups if group.name in names]


def find_group(groups: Sequence[ChannelGroup], layer: str) -> ChannelGroup:
    """Return the group that holds `layer`."""
    for group in groups:
        if layer in group.layers:
            return group
    known = ", ".join(name for group in groups for name in group.layers)
    raise PruningError(
        f"layer {layer!r} cannot be pruned: it is no dense convolution or linear layer of the network; "
        f"choose among {known}"
    )


def _coupled_layers(roots: Mapping[str, Labels]) -> list[list[str]]:
    """Partition the layers into those that share channel roots, in order of execution."""
    partition: list[tuple[list[str], set[int]]] = []
    for name, row in roots.items():
        members, channels = [name], set(row)
        apart = []
        for others, other_channels in partition:
            if other_channels.isdisjoint(channels):
                apart.append((others, other_channels))
            else:
                members, channels = others + members, other_channels | channels
        partition = [*apart, (members, channels)]
    order = {name: position for position, name in enumerate(roots)}
    return sorted(
        (sorted(members, key=order.__getitem__) for members, _ in partition), key=lambda m: order[m[0]]
    )
