"""Which layers a search may take channels from: those whose outputs one other layer alone reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from decomposition import DecompositionError, compressible_layers
from decomposition.calibration.metric import WIDEST, Narrowing
from decomposition.network.inputs import InputShape, example_tensor
from pruning import PruningError, channel_groups
from rankrl.errors import ConfigError


def channel_narrowings(
    model: nn.Module, input_shape: InputShape, fractions: Sequence[float], multiple: int = 1
) -> dict[str, Narrowing]:
    """Return how many channels layers may read, by the name of the reading layer.

    Channels between two layers can be removed with nothing else in the network noticing where one layer makes
    them, one reads them, and the two follow each other: inside a residual block, or along a plain chain.
    Channels that several layers share, a residual stream say, or that a layer norm normalises together, are
    what `task=prune` removes.
    """
    wrong = [each for each in fractions if not 0 < each < 1]
    if wrong:
        raise ConfigError(
            f"decomposition.channels: {wrong[0]} is outside (0, 1); give fractions of the channels to keep, "
            "for example [0.75,0.5]"
        )
    try:
        groups = channel_groups(model, example_tensor(model, input_shape))
    except (PruningError, DecompositionError) as error:
        raise ConfigError(
            f"decomposition.channels: the network cannot be followed ({error}); leave channels empty"
        ) from error
    specs = compressible_layers(model, input_shape)
    order = [spec.name for spec in specs]
    wide = {spec.name for spec in specs if math.prod(spec.weight_shape[1:]) > WIDEST}  # they have no matrix
    narrowings: dict[str, Narrowing] = {}
    for group in groups:
        if group.obstacle is not None or group.norms or len(group.layers) != 1 or len(group.readers) != 1:
            continue
        ((producer, made),), ((reader, read),) = group.layers.items(), group.readers.items()
        # Channels that go in pairs or groups only (of a group norm, say) are left to task=prune.
        if made != read or group.units != len(made):
            continue
        if reader in wide or producer not in order or order.index(producer) + 1 >= len(order):
            continue
        counts = _counts(len(made), fractions, multiple)
        if counts and order[order.index(producer) + 1] == reader:
            narrowings[reader] = Narrowing(producer, counts)
    if not narrowings:
        raise ConfigError(
            "decomposition.channels: the network has no two layers of which one alone reads what the other "
            "makes; leave channels empty, or remove channels with task=prune"
        )
    return narrowings


def _counts(channels: int, fractions: Sequence[float], multiple: int) -> tuple[int, ...]:
    """Return the numbers of channels that are kept, largest first."""
    step = multiple if channels > multiple else 1
    counts = {max(step, step * round(fraction * channels / step)) for fraction in fractions}
    return tuple(sorted((each for each in counts if each < channels), reverse=True))
