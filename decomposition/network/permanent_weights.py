"""Weights that are computed anew at every call, by weight norm and the like, as ordinary parameters."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decomposition.network.rewriting import rewritten
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied, remove_parametrizations
from decomposition.network.wrappers import unwrapped
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
