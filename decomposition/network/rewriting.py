"""Rewriting layers before a plan: done in one place, recorded in the network and its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from decomposition.errors import PlanError
from decomposition.network.left_behind import tell_of_lost
from decomposition.network.surgery import replace_module

_MARK = "_rewrites"


@dataclass(frozen=True)
class Rewrite:
    """Layers that were put into an equivalent form, so that plans may change them.

    Attributes:
        kind: Name of the function that does it, such as `plain_attention`.
        layers: Names of the layers before.
    """

    kind: str
    layers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"rewrite": self.kind, "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, entry: Any, kinds: Iterable[str], source: str) -> Rewrite:
        """Read what `to_dict` returned; strict.

        Raises:
            PlanError: It is something else, or of a kind that is unknown here.
        """
        known = isinstance(entry, dict) and set(entry) == {"rewrite", "layers"}
        if not known or entry["rewrite"] not in kinds or not _are_names(entry["layers"]):
            raise PlanError(
                f"{source}: an entry of preparation must have rewrite (one of {', '.join(sorted(kinds))}) "
                f"and layers (a list of names), got {entry!r}"
            )
        return cls(entry["rewrite"], tuple(entry["layers"]))


def rewritten(network: nn.Module, kind: str, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Put layers into a network, in place, and note in it that they were rewritten."""
    if not layers:
        return network
    rewrites = (*rewrites_of(network), Rewrite(kind, tuple(layers)))
    modules = dict(network.named_modules())
    tell_of_lost(
        network, {name: modules[name] for name, layer in layers.items() if layer is not modules[name]}
    )
    for name, layer in layers.items():
        replace_module(network, modules[name], layer)
        network = layer if name == "" else network
    vars(network)[_MARK] = rewrites
    return network


def rewrites_of(model: nn.Module) -> tuple[Rewrite, ...]:
    """Return what was rewritten in a network and in its parts, in order."""
    return tuple(
        Rewrite(rewrite.kind, tuple(".".join(filter(None, (name, layer))) for layer in rewrite.layers))
        for name, module in model.named_modules()
        for rewrite in vars(module).get(_MARK, ())
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
