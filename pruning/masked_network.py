"""Mask the channel groups of a network, and turn the result into a plain, smaller network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from pruning.channel_walk import channel_axis
from pruning.copies import check_values, copied, fresh_input, own_modes, plain_network, public_call
from pruning.errors import PruningError
from pruning.groups import ChannelGroup, KeptChannels, groups_of_walk, removable_groups
from pruning.masks import ChannelMask, GatedForward, HardConcreteMask, scale_channels
from pruning.removal import cut_in_place, validate_kept
from pruning.tracing import walk_channels


class MaskedNetwork(nn.Module):
    """A copy of a network in which every channel of the chosen groups is multiplied by a learned gate.

    The gates act where channels are read: on the input of each convolution and linear layer that mixes the
    channels of a group. That is after batch norm, activation and pooling, and after additions and
    concatenations, so that a zero gate silences the channel for good; and a gate that is not zero can be
    folded into the reading weights exactly, whatever lies between. A residual stream has one mask, applied at
    each of its readers and not to the stream itself, where the factors of successive blocks would multiply.
    Layer and RMS norms over the channels of a group take the statistics of what is open
    (`ChannelMask.presence`), so that closing a channel is the same as removing it.

    Args:
        model: a network of one tensor input; it is copied.
        example_input: a batch that it accepts, channels on axis 1.
        mask: makes the mask of a group from its number of units, such as `GroupLassoMask`.
        layers: names of layers whose groups get a mask; None for all groups that can be pruned.

    Attributes:
        network: the copy of the model.
        groups: the masked channel groups, in order of execution.
        masks: their masks, in the same order.
        example_input: the example input.
        radii: the norms that `constrain_norms` has fixed, one per unit, or None.

    Raises:
        PruningError: if a named layer cannot be pruned, or none can.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: torch.Tensor,
        mask: Callable[[int], ChannelMask],
        layers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_values(model)
        with own_modes():
            self.network = copied(plain_network(model))
            self._walk = walk_channels(self.network, example_input)
            self._every_group = groups_of_walk(self._walk)
            self.groups: list[ChannelGroup] = removable_groups(self._every_group, layers)
            self.masks = nn.ModuleList(mask(group.units) for group in self.groups).to(example_input.device)
            self.example_input = example_input
            self.radii: torch.Tensor | None = None
            self._readers: dict[str, _ReaderGate] = {}
            for number, (name, index) in enumerate(self._gate_indices("readers").items()):
                self.register_buffer(f"_index_{number}", index.to(example_input.device), persistent=False)
                gate = _ReaderGate()
                self.network.get_submodule(name).register_forward_pre_hook(gate)
                self._readers[name] = gate
            self._norms: dict[str, GatedForward] = {}
            for number, (name, index) in enumerate(self._gate_indices("norms").items()):
                self.register_buffer(
                    f"_norm_index_{number}", index.to(example_input.device), persistent=False
                )
                self._norms[name] = GatedForward(self.network.get_submodule(name))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the network with the gates of this pass, one draw for all readers of a group."""
        drawn = [mask.gates() for mask in self._masks()]
        gates = self._row(drawn)
        try:
            self._set_presence(drawn)
            for gate, index in zip(self._readers.values(), self._indices(), strict=True):
                gate.scale = gates[index]
            output: torch.Tensor = self.network(fresh_input(inputs))
            return output
        finally:
            for gate in self._readers.values():
                gate.scale = None
            for norm in self._norms.values():
                norm.presence = None

    def network_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the network, without those of the masks."""
        return list(self.network.parameters())

    def mask_parameters(self) -> list[nn.Parameter]:
        """Return the masks' parameters; give them an optimizer of their own without weight decay."""
        return list(self.masks.parameters())

    def penalty(self, strengths: Mapping[str, float] | None = None) -> torch.Tensor:
        """Return the sum of all gates' penalties, a scalar.

        Args:
            strengths: a factor for the penalty of some groups, by group name (per-branch strengths); 1
                elsewhere.

        Raises:
            PruningError: if a name is no masked group, or a factor is negative.
        """
        strengths = strengths or {}
        names = [group.name for group in self.groups]
        for name, strength in strengths.items():
            if name not in names or not strength >= 0:
                raise PruningError(
                    f"strength {strength!r} for {name!r}: "
                    f"give a factor of at least 0 for one of {', '.join(names)}"
                )
        penalties = [
            strengths.get(name, 1.0) * mask.penalty().sum()
            for name, mask in zip(names, self._masks(), strict=True)
        ]
        return torch.stack(penalties).sum()

    def open_units(self) -> dict[str, torch.Tensor]:
        """Return the open units of each group, boolean, shape (units,), with a channel for every layer."""
        return {group.name: group.spare(mask.open_units(), mask.scores()) for group, mask in self._pairs()}

    def open_fraction(self) -> float:
        """Return the share of all masked units that are open."""
        opened = torch.cat(list(self.open_units().values()))
        return float(opened.float().mean())

    def scores(self) -> dict[str, torch.Tensor]:
        """Return how much the units of each group matter, shape (units,), comparable across groups."""
        return {group.name: mask.scores() for group, mask in self._pairs()}

    def trap(self, threshold: float) -> None:
        """Close every unit whose deterministic gate is smaller than `threshold`.

        The best unit of a layer that would lose all its channels stays, or is reopened.

        Args:
            threshold: of the gate's absolute value, at least 0; a gate that is exactly zero is always closed.

        Raises:
            PruningError: if a gate is not finite.
        """
        for group, mask in self._pairs():
            opened = mask.open_units() & (mask.deterministic_gates().detach().abs() >= threshold)
            self._close_all_but(group, mask, opened)

    def keep(self, units: Mapping[str, torch.Tensor]) -> None:
        """Close every unit that is not in `units` (boolean by group name), but the last of a layer."""
        for group, mask in self._pairs():
            self._close_all_but(group, mask, mask.open_units() & units[group.name].to(mask.alive.device))

    def reopen(self, units: Mapping[str, torch.Tensor]) -> None:
        """Open those of `units` (boolean by group name) that are closed."""
        for group, mask in self._pairs():
            mask.reopen(units[group.name].to(mask.alive.device) & ~mask.open_units())

    def limit(self, fraction: float) -> None:
        """Close the weakest open units of each group so that at most this share of its units remains.

        Args:
            fraction: of the units of every group, above 0 and at most 1 (the hard limit besides the soft
                penalty).

        Raises:
            PruningError: if the fraction is outside its range.
        """
        if not 0 < fraction <= 1:
            raise PruningError(f"the limit on kept channels must lie in (0, 1], got {fraction}")
        for group, mask in self._pairs():
            # A group keeps a unit at any limit.
            allowed = max(1, int(fraction * group.units))
            best = torch.zeros_like(mask.alive)
            best[mask.scores().argsort(descending=True, stable=True)[:allowed]] = True
            self._close_all_but(group, mask, mask.open_units() & best)

    def freeze(self) -> None:
        """Fix the masks: zero gates close, hard-concrete gates become binary, and none learns any more."""
        self.trap(0.0)
        for mask in self._masks():
            mask.freeze()

    @contextmanager
    def sampled_gates(self) -> Iterator[None]:
        """Within this context, stochastic gates are sampled at evaluation too."""
        stochastic = [mask for mask in self._masks() if isinstance(mask, HardConcreteMask)]
        try:
            for mask in stochastic:
                mask.sample_at_evaluation = True
            yield
        finally:
            for mask in stochastic:
                mask.sample_at_evaluation = False

    def constrain_norms(self) -> None:
        """Fix, for `project_norms`, the norm of the weights that read each unit, over all readers.

        Without it a network rescales around its mask. Masks that can take on any scale (group LASSO) receive
        the units' norms, relative to the root mean square in the group, and all units of a group read with
        that one norm, so that the function of the network stays the same. For other masks every unit keeps
        the norm that it has.
        """
        norms = self._reading_norms().split([*(group.units for group in self.groups), 1])
        radii = []
        for mask, norm in zip(self._masks(), norms, strict=False):
            if mask.absorbs_scale:
                common = norm.square().mean().sqrt()
                mask.rescale(norm / common)
                norm = common.expand_as(norm)
            radii.append(norm)
        self.radii = self._row(radii)
        self.project_norms()

    def project_norms(self) -> None:
        """Return to the norms fixed by `constrain_norms`.

        The reading weights of every unit are scaled back to their norm, and gates that can take on any scale
        to a root mean square of 1 over the open units: a batch norm behind the readers would let all gates of
        a group shrink together at no loss, so that the penalty would choose nothing.

        Raises:
            PruningError: if `constrain_norms` was not called before.
        """
        if self.radii is None:
            raise PruningError("no norms are fixed; call constrain_norms first")
        norms = self._reading_norms()
        self._scale_readers(self.network, torch.where(norms > 0, self.radii / norms, 1.0))
        for mask in self._masks():
            if mask.absorbs_scale:
                gates = mask.deterministic_gates().detach()
                size = gates[mask.alive].square().mean().sqrt()
                mask.rescale(torch.where(size > 0, 1 / size, 1.0))

    def kept_channels(self) -> KeptChannels:
        """Return the sorted output channels that stay open, of every layer with a mask."""
        kept: KeptChannels = {}
        opened = self.open_units()
        for group in self.groups:
            kept.update(group.kept(opened[group.name]))
        return kept

    @public_call
    def folded(self) -> nn.Module:
        """Return a plain copy of the network with the deterministic gates folded into the reading weights.

        Layer and RMS norms count all channels again, closed ones too, until these are `removed`.
        """
        plain = copied(self.network)
        for name in self._readers:
            hooks = plain.get_submodule(name)._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _ReaderGate)]:
                del hooks[key]
        for name in self._norms:
            GatedForward.remove_from(plain.get_submodule(name))
        gates = self._row([mask.deterministic_gates().detach() for mask in self._masks()])
        self._scale_readers(plain, gates)
        return plain

    @public_call
    def removed(self) -> nn.Module:
        """Return the plain network with the gates folded in and the closed channels cut out.

        It computes what the masked network computes at evaluation; behind layer and RMS norms, hard-concrete
        gates must be 0 or 1 for that, as they are once frozen.
        """
        smaller = self.folded()
        cut_in_place(smaller, self._walk, validate_kept(self.kept_channels(), self._every_group))
        return smaller

    def _masks(self) -> list[ChannelMask]:
        return [mask for mask in self.masks if isinstance(mask, ChannelMask)]

    def _pairs(self) -> Iterator[tuple[ChannelGroup, ChannelMask]]:
        return zip(self.groups, self._masks(), strict=True)

    def _indices(self) -> list[torch.Tensor]:
        return [self.get_buffer(f"_index_{number}") for number in range(len(self._readers))]

    def _row(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate one value per unit over all groups, and a one for the channels that have no mask."""
        return torch.cat([*values, values[0].new_ones(1)])

    def _set_presence(self, gates: list[torch.Tensor]) -> None:
        """Set the weight of each channel in the norms' statistics for this pass."""
        if not self._norms:
            return
        presence = self._row([mask.presence(gate) for mask, gate in zip(self._masks(), gates, strict=True)])
        if not presence.requires_grad and bool((presence == 1).all()):
            return  # all channels count in full: the norms' own kernels are faster
        for number, norm in enumerate(self._norms.values()):
            norm.presence = presence[self.get_buffer(f"_norm_index_{number}")]

    def _gate_indices(self, kind: Literal["readers", "norms"]) -> dict[str, torch.Tensor]:
        """Return, for each reader or norm, the index of each channel's gate among all gates (`_row`)."""
        total = sum(group.units for group in self.groups)
        indices: dict[str, torch.Tensor] = {}
        offset = 0
        for group in self.groups:
            for name, row in getattr(group, kind).items():
                units = torch.tensor(row)
                index = indices.setdefault(name, torch.full((len(row),), total))
                index[units >= 0] = units[units >= 0] + offset
            offset += group.units
        return indices

    def _close_all_but(self, group: ChannelGroup, mask: ChannelMask, opened: torch.Tensor) -> None:
        staying = group.spare(opened, mask.scores())
        mask.reopen(staying & ~opened)
        mask.close(~staying)

    def _reading_norms(self) -> torch.Tensor:
        """Return the Euclidean norm of all weights that read each unit, in the order of `_row`."""
        squares: torch.Tensor | None = None
        for name, index in zip(self._readers, self._indices(), strict=True):
            columns = _weight(self.network, name).detach().transpose(0, 1).flatten(1).square().sum(1)
            if squares is None:
                squares = columns.new_zeros(sum(group.units for group in self.groups) + 1)
            squares.index_add_(0, index, columns)
        if squares is None:
            raise PruningError("no layer reads the masked channels")
        squares[-1] = 1.0
        return squares.sqrt()

    def _scale_readers(self, network: nn.Module, factors: torch.Tensor) -> None:
        with torch.no_grad():
            for name, index in zip(self._readers, self._indices(), strict=True):
                weight = _weight(network, name)
                weight.copy_(scale_channels(weight, factors[index]))


class _ReaderGate:
    """A forward pre-hook that multiplies the input channels of one layer by the gates of the running pass."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.scale is None:
            raise PruningError(
                "the network inside a MaskedNetwork was called directly; call the MaskedNetwork"
            )
        return (scale_channels(inputs[0], self.scale, channel_axis(module)), *inputs[1:])


def _weight(network: nn.Module, name: str) -> nn.Parameter:
    weight = network.get_submodule(name).weight
    if not isinstance(weight, nn.Parameter):
        raise TypeError(f"{name} has no weight")
    return weight
