"""Rewrite layers before they are listed, and find weights that are permanent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decomposition.errors import PlanError
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import (
    copied,
    remove_parametrizations,
    replace_module,
    unwrapped,
    warn_lost_attributes,
)
from decomposition.public_calls import public_call

Module = TypeVar("Module", bound=nn.Module)
_HOOKS = (WeightNorm, SpectralNorm, prune.BasePruningMethod)


@public_call(values=False)
def plain_weights(model: Module) -> Module:
    """Return a copy of a model whose weights are parameters, which plans may replace.

    Weights that `torch.nn.utils.parametrizations`, the older `weight_norm` and `spectral_norm`, or
    `torch.nn.utils.prune` compute at every call keep their present value. Training the copy further changes
    them freely.

    Args:
        model: Any module; left untouched.
    """
    network = copied(unwrapped(model))
    forms = {name: plain_form(module) for name, module in network.named_modules()}
    layers = {name: layer for name, layer in forms.items() if layer is not None}
    return cast(Module, rewritten(network, "plain_weights", layers))


def plain_form(module: nn.Module) -> nn.Module | None:
    """Make a layer's computed weights parameters, in place; return `None` where it has none."""
    if not computes_weights(module):
        return None
    if parametrize.is_parametrized(module):
        remove_parametrizations(module)
    for hook in _hooks(module):
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if isinstance(hook, WeightNorm):
            name = hook.name
            remove_weight_norm(module, name)
        elif isinstance(hook, SpectralNorm):
            name = hook.name
            remove_spectral_norm(module, name)
        else:
            name = hook._tensor_name
            prune.remove(module, name)
        cast(Any, module)._parameters[name].requires_grad_(trained)
    return module


def computes_weights(module: nn.Module) -> bool:
    """Tell whether `plain_weights` would change a layer; rounded weights do not count."""
    return bool(_hooks(module)) or (parametrize.is_parametrized(module) and not is_rounded(module))


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _HOOKS)]


_MARK = "_rewrites"


@dataclass(frozen=True)
class Rewrite:
    """Layers that were rewritten into an equivalent form, which plans may change.

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
    """Replace layers in a network, in place, and record the rewrite in it."""
    if not layers:
        return network
    rewrites = (*rewrites_of(network), Rewrite(kind, tuple(layers)))
    modules = dict(network.named_modules())
    warn_lost_attributes(
        network, {name: modules[name] for name, layer in layers.items() if layer is not modules[name]}
    )
    for name, layer in layers.items():
        replace_module(network, modules[name], layer)
        network = layer if name == "" else network
    vars(network)[_MARK] = rewrites
    return network


def rewrites_of(model: nn.Module) -> tuple[Rewrite, ...]:
    """Return the recorded rewrites of a network and of its parts, in order."""
    return tuple(
        Rewrite(rewrite.kind, tuple(".".join(filter(None, (name, layer))) for layer in rewrite.layers))
        for name, module in model.named_modules()
        for rewrite in vars(module).get(_MARK, ())
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
