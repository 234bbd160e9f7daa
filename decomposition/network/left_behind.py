"""What a layer carries and its replacement does not: named in the log, never lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn

log = logging.getLogger(__name__)

_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_NAMED = 5
_TOLD: WeakSet[nn.Module] = WeakSet()


def tell_of_lost(model: nn.Module, replaced: Mapping[str, nn.Module]) -> None:
    """Log the hooks and attributes of replaced layers, once for each network."""
    carried = {name: lost for name, layer in replaced.items() if (lost := _carried(layer))}
    if not carried or model in _TOLD:
        return
    _TOLD.add(model)
    listed = "; ".join(f"{name!r}: {lost}" for name, lost in [*carried.items()][:_NAMED])
    log.warning(
        "what replaced layers carried is not on the new ones (%s%s); put it there where it is needed",
        listed,
        f"; and {len(carried) - _NAMED} more" if len(carried) > _NAMED else "",
    )


def _carried(layer: nn.Module) -> str:
    """Return what a layer has beyond a fresh layer of its kind, for messages."""
    carried = [what for name, what in _HOOKS.items() if vars(layer).get(name)]
    usual = _usual(next(base for base in (*type(layer).__mro__, nn.Module) if base in _SMALL))
    added = [
        name
        for name in (*vars(layer), *layer._parameters, *layer._buffers, *layer._modules)
        if name not in usual and not name.startswith("__")
    ]
    return ", ".join(carried + [f"the attribute {name}" for name in added])


_SMALL: dict[type, tuple[Any, ...]] = {
    nn.Module: (),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d), (1, 1, 1)),
    **dict.fromkeys((nn.Linear, nn.MultiheadAttention), (1, 1)),
}


@cache
def _usual(kind: type) -> frozenset[str]:
    layer = kind(*_SMALL[kind])
    return frozenset((*vars(layer), *layer._parameters, *layer._buffers, *layer._modules))
