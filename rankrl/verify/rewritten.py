"""The proof that what was copied and rewritten before a search is still the user's network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import DecompositionError, Inputs
from decomposition.network.inputs import Place, mapped, rows, split
from rankrl.onnx.export.outputs import output_names
from rankrl.verify.fidelity import COARSE_FLOOR, FLOOR, Array, departure, nudged, relative_error
from rankrl.verify.network_outputs import as_array, network_outputs

_INPUTS = 4


def check_rewritten(model: nn.Module, dense: nn.Module, inputs: Inputs) -> None:
    """Refuse a network that would be compressed as something else than it is.

    Four inputs are sent through the user's network and through the copy that layers were rewritten in. How
    far they may differ is seen by sending them through the first in smaller batches, and nudged a little.
    """
    some = rows(inputs, slice(_INPUTS))
    known = network_outputs(model, some)
    halves = _joined(network_outputs(model, each) for each in split(some, _INPUTS // 2))
    noisy = [halves, network_outputs(model, mapped(nudged, some))]
    names, name = output_names(list(known)), type(model).__name__
    half = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    floor = COARSE_FLOOR if half else FLOOR
    computed = network_outputs(dense, some)
    told = departure(
        names,
        list(known.values()),
        [[_like(y, each.get(place, y)) for place, y in known.items()] for each in noisy],
        [computed.get(place, np.empty(0)) for place in known],
        floor=floor,
    )
    if told is not None:
        layer = _first_departing(model, dense, some, floor)
        where = "" if layer is None else f", first of all that of the layer {layer!r}"
        raise DecompositionError(
            f"{name} would be compressed as another network than it is: with nothing compressed yet, "
            f"{told}{where}. Leave that layer as it is (skip), or write it with layers of torch"
        )


def _like(expected: Array, computed: Array) -> Array:
    """Return what is found; what is expected where it has another shape, as halves of (layers, N, size)."""
    return computed if computed.shape == expected.shape else expected


def _joined(parts: Iterable[Mapping[Place, Array]]) -> dict[Place, Array]:
    """Return the outputs of several batches as those of one; what has no first axis is that of the first."""
    first, *others = parts
    return {
        place: np.concatenate([y, *(each[place] for each in others)]) if y.ndim else y
        for place, y in first.items()
    }


def _first_departing(model: nn.Module, dense: nn.Module, inputs: Inputs, floor: float) -> str | None:
    """Return the name of the module of both networks whose first output is the first to differ."""
    with _watched(model) as before, _watched(dense) as after:
        for network in (model, dense):
            network_outputs(network, inputs)
    shared = [name for name in before if name in after]
    return next((name for name in shared if not relative_error(before[name], after[name]) <= floor), None)


@contextmanager
def _watched(network: nn.Module) -> Iterator[dict[str, Array]]:
    """Collect what modules return first, in the order in which they end; the network itself left out."""
    seen: dict[str, Array] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, as_array(output))

        return note

    handles = [each.register_forward_hook(hook(name)) for name, each in network.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
