"""Repeating the rewrites before a plan on a network fresh from its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from decomposition.network.permanent_weights import plain_form as permanent
from decomposition.network.rewriting import Rewrite, rewrites_of, rewritten
from decomposition.network.surgery import copied
from decomposition.rewrites.attention import plain_form as attention
from decomposition.rewrites.own_layers import plain_form as own_layer
from decomposition.rewrites.transposed import plain_form as transposed

REWRITERS: dict[str, Callable[[nn.Module], nn.Module | None]] = {
    "plain_attention": attention,
    "plain_layers": own_layer,
    "plain_transposed": transposed,
    "plain_weights": permanent,
}
"""From a layer, which may be changed, to its rewritten form; `None` if it has that form already."""


def prepared(model: nn.Module, rewrites: Sequence[Rewrite]) -> nn.Module:
    """Return a network with layers rewritten; the network itself if they are already."""
    if set(rewrites) <= set(rewrites_of(model)):
        return model
    network = copied(model)
    for rewrite in rewrites:
        modules = dict(network.named_modules())
        forms = {name: REWRITERS[rewrite.kind](modules[name]) for name in rewrite.layers if name in modules}
        network = rewritten(network, rewrite.kind, {name: f for name, f in forms.items() if f is not None})
    return network
