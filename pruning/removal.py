"""Cut channels out of every layer that makes, carries or reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import fx, nn

from pruning.channel_walk import ChannelWalk, Labels, pad_arguments
from pruning.copies import copied, plain_network, public_call
from pruning.errors import PruningError
from pruning.groups import ChannelGroup, KeptChannels, find_group, groups_of_walk
from pruning.masks import GatedForward
from pruning.tracing import walk_channels


@public_call
def remove_channels(
    model: nn.Module, kept: Mapping[str, Sequence[int]], example_input: torch.Tensor
) -> nn.Module:
    """Return a smaller copy of a network that holds only the kept channels.

    The copy computes what the network computes when every layer that reads a removed channel receives zero in
    its place and every layer or RMS norm that normalises it takes the statistics of the channels that stay
    (`kept_norms`). Convolutions, linear layers, norms and parameters with one value per channel are cut in
    place and keep their names; of grouped convolutions and group norms whole groups go. A module that pads
    channels (an option-A shortcut) is replaced by one with the new widths. The model is
    left as it is.

    Args:
        model: a network of one tensor input.
        kept: the sorted output channels to keep of each layer, as `ChannelGroup.kept` returns them. Layers
            that are not named keep all their channels; coupled layers must be named together.
        example_input: a batch that the network accepts, channels on axis 1.

    Raises:
        PruningError: if a layer is unknown or cannot be pruned, if its channels are not a sorted, non-empty
            list of distinct channel numbers, or if coupled layers disagree.
    """
    walk = walk_channels(model, example_input)
    return cut(model, walk, validate_kept(kept, groups_of_walk(walk)))


@public_call
def kept_inputs(
    model: nn.Module, kept: Mapping[str, Sequence[int]], example_input: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return which input channels (or features) stay of each layer that loses some, boolean, shape (in,).

    Args:
        model: see `remove_channels`.
        kept: see there.
        example_input: see there.

    Raises:
        PruningError: see there.
    """
    walk = walk_channels(model, example_input)
    return _losing(walk, kept, walk.readers)


@public_call
def kept_norms(
    model: nn.Module, kept: Mapping[str, Sequence[int]], example_input: torch.Tensor
) -> dict[str, nn.Module]:
    """Return copies of the layer and RMS norms that lose channels, with the statistics of those that stay.

    They still have all of their channels: in a network that is not cut yet they compute like the cut norms.

    Args:
        model: see `remove_channels`.
        kept: see there.
        example_input: see there.

    Raises:
        PruningError: see there.
    """
    if not any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in model.modules()):
        return {}
    walk = walk_channels(model, example_input)
    norms = {}
    for name, staying in _losing(walk, kept, walk.joint_norms).items():
        norms[name] = copied(plain_network(model).get_submodule(name))
        GatedForward(norms[name]).presence = staying.to(example_input.device)
    return norms


def _losing(
    walk: ChannelWalk, kept: Mapping[str, Sequence[int]], rows: Mapping[str, Labels]
) -> dict[str, torch.Tensor]:
    """Return which channels stay of each of the layers that lose some."""
    gone = _removed_roots(walk, validate_kept(kept, groups_of_walk(walk)))
    staying = {
        name: torch.tensor([walk.labels.root(label) not in gone for label in labels])
        for name, labels in rows.items()
    }
    return {name: mask for name, mask in staying.items() if not mask.all()}


def validate_kept(kept: Mapping[str, Sequence[int]], groups: Sequence[ChannelGroup]) -> KeptChannels:
    """Check a mapping of kept channels against the groups of a network and return it for every layer."""
    for name, channels in kept.items():
        _validate_channels(name, channels, len(find_group(groups, name).layers[name]))
    complete: KeptChannels = {}
    for group in groups:
        rows = {name: list(kept.get(name, range(len(row)))) for name, row in group.layers.items()}
        if all(len(rows[name]) == len(row) for name, row in group.layers.items()):
            complete.update(rows)
            continue
        if group.obstacle is not None:
            raise PruningError(f"layer {group.name!r} cannot be pruned: {group.obstacle}")
        closed = torch.zeros(group.units, dtype=torch.bool)
        for name, row in group.layers.items():
            remaining = set(rows[name])
            closed[[unit for channel, unit in enumerate(row) if channel not in remaining]] = True
        agreed = group.kept(~closed)
        for name, channels in agreed.items():
            if channels != rows[name]:
                others = ", ".join(repr(other) for other in group.layers if other != name) or "itself"
                raise PruningError(
                    f"layer {name!r} keeps channels {rows[name]}, but it is coupled with {others}, "
                    f"which leave it {channels}; take the channels of the whole group from ChannelGroup.kept"
                )
        complete.update(agreed)
    return complete


def cut(model: nn.Module, walk: ChannelWalk, kept: KeptChannels) -> nn.Module:
    """Cut the validated `kept` channels out of a copy of `model`, whose channel walk is `walk`."""
    smaller = copied(plain_network(model))
    cut_in_place(smaller, walk, kept)
    return smaller


def cut_in_place(model: nn.Module, walk: ChannelWalk, kept: KeptChannels) -> None:
    """Cut all but the validated `kept` channels out of `model`, whose channel walk is `walk`."""
    gone = _removed_roots(walk, kept)

    def staying(labels: Labels) -> list[int]:
        return [position for position, label in enumerate(labels) if walk.labels.root(label) not in gone]

    for name, outputs in walk.producers.items():
        inputs = walk.readers[name]
        if len(staying(inputs)) < len(inputs) or len(kept[name]) < len(outputs):
            _cut_layer(model.get_submodule(name), kept[name], staying(inputs))
    for name, labels in (*walk.norms.items(), *walk.joint_norms.items()):
        _cut_norm(model.get_submodule(name), staying(labels), len(labels))
    for name, (entering, leaving) in walk.grouped.items():
        _cut_grouped(model.get_submodule(name), staying(leaving), len(staying(entering)))
    for name, labels in walk.vectors.items():
        if len(staying(labels)) < len(labels):
            _cut_vector(model, name, staying(labels))
    for name, pad in walk.pads.items():
        before, after = len(staying(pad.before)), len(staying(pad.after))
        if (before, after) != (len(pad.before), len(pad.after)):
            model.set_submodule(name, _repad(model.get_submodule(name), before, after))


def _removed_roots(walk: ChannelWalk, kept: KeptChannels) -> set[int]:
    """Return the roots of the labels of all output channels that are not kept."""
    gone: set[int] = set()
    for name, labels in walk.producers.items():
        remaining = set(kept[name])
        gone.update(
            walk.labels.root(label) for channel, label in enumerate(labels) if channel not in remaining
        )
    return gone


def _validate_channels(name: str, channels: Sequence[int], available: int) -> None:
    advice = f"give a sorted list of distinct channel numbers from 0 to {available - 1}"
    if any(not isinstance(c, int) or isinstance(c, bool) for c in channels):
        raise PruningError(f"kept channels of layer {name!r} are {channels!r}; {advice}")
    if not channels:
        raise PruningError(f"layer {name!r} would lose all of its {available} channels; keep at least one")
    if list(channels) != sorted(set(channels)) or channels[0] < 0 or channels[-1] >= available:
        raise PruningError(f"kept channels of layer {name!r} are {list(channels)}; {advice}")


def _parameter(old: torch.Tensor, new: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(new.detach().clone(), requires_grad=old.requires_grad)


def _cut_filters(layer: nn.Module, outputs: list[int], inputs: int) -> torch.Tensor:
    """Keep the given filters of a convolution or linear layer, which read so many inputs from now on."""
    if not isinstance(layer.weight, torch.Tensor):
        raise TypeError(f"{type(layer).__name__} has no weight")
    layer.weight = _parameter(layer.weight, layer.weight[outputs])
    if isinstance(layer.bias, torch.Tensor):
        layer.bias = _parameter(layer.bias, layer.bias[outputs])
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = inputs, len(outputs)
    else:
        layer.in_channels, layer.out_channels = inputs, len(outputs)  # type: ignore[assignment]
    return layer.weight


def _cut_layer(layer: nn.Module, outputs: list[int], inputs: list[int]) -> None:
    """Keep the given output and input channels of a convolution or linear layer."""
    weight = _cut_filters(layer, outputs, len(inputs))
    layer.weight = _parameter(weight, weight[:, inputs])


def _cut_norm(layer: nn.Module, channels: list[int], before: int) -> None:
    """Keep some channels of a norm or PReLU with running statistics; of a group norm, whole groups."""
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = layer.num_groups * len(channels) // before
        layer.num_channels = len(channels)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = (len(channels),)
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = len(channels)
    else:
        layer.num_features = len(channels)  # type: ignore[assignment]
    for name, parameter in list(layer._parameters.items()):
        if parameter is not None:
            setattr(layer, name, _parameter(parameter, parameter[channels]))
    for name, buffer in list(layer._buffers.items()):
        if buffer is not None and buffer.ndim == 1:
            setattr(layer, name, buffer[channels].clone())


def _cut_grouped(layer: nn.Module, outputs: list[int], inputs: int) -> None:
    """Keep the filters of a grouped convolution whose groups read the remaining `inputs`."""
    weight = _cut_filters(layer, outputs, inputs)
    layer.groups = inputs // weight.shape[1]  # type: ignore[assignment]


def _cut_vector(network: nn.Module, name: str, channels: list[int]) -> None:
    """Keep some entries of a parameter or buffer of one value per channel, along its only long axis."""
    owner, _, key = name.rpartition(".")
    module = network.get_submodule(owner)
    old: torch.Tensor = getattr(module, key)
    axis = next(axis for axis, size in enumerate(old.shape) if size > 1)
    new = old.detach().index_select(axis, torch.tensor(channels, device=old.device))
    setattr(module, key, _parameter(old, new) if isinstance(old, nn.Parameter) else new)


def _repad(owner: nn.Module, before: int, after: int) -> nn.Module:
    """Replace a module that pads channels by one that pads `before` and `after` of them."""
    graph = fx.Tracer().trace(owner)
    for node in graph.nodes:
        if node.target is not F.pad:
            continue
        widths, _, _ = pad_arguments(node.args, dict(node.kwargs))
        # The last pair is of the channel axis: the walk accepts no padding of the batch axis.
        widths[-2:] = [before, after]
        if "pad" in node.kwargs:
            node.update_kwarg("pad", tuple(widths))
        else:
            node.update_arg(1, tuple(widths))
    return fx.GraphModule(owner, graph, class_name=type(owner).__name__)


@public_call
def untrained_copy(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy with all weights drawn anew, for training from scratch (Liu et al. 2019).

    Args:
        network: a network, usually the result of `remove_channels`; it is left as it is.
        seed: of the initial weights; torch's global generator stays as it was.

    Raises:
        PruningError: if a module holds parameters and has no `reset_parameters` to draw them again.
    """
    fresh = copied(plain_network(network))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif module._parameters:
                raise PruningError(
                    f"{name or 'the network'} ({type(module).__name__}) cannot be drawn anew: it holds "
                    "parameters of its own; give its class a method reset_parameters"
                )
    return fresh
