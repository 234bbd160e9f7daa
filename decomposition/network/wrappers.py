"""Wrappers around networks: those that only run the network are taken off, other forms are refused."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.surgery import copied, replace_module

log = logging.getLogger(__name__)

# By name, because importing the classes would import torch's compiler and its distributed packages.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
}
_SHARDED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.distributed.fsdp.FSDPModule",
}
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
_WAY = "give the nn.Module that it was made from, with the weights loaded into it"
_TOLD: WeakSet[nn.Module] = WeakSet()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the plain network inside its wrappers, and say so once.

    Wrappers that compute what the network inside computes are taken off: torch.compile's, `DataParallel`,
    `DistributedDataParallel` and `AveragedModel`, also when they are nested.
    """
    if not isinstance(model, nn.Module):
        raise DecompositionError(f"a network is a torch.nn.Module, got a {type(model).__name__}; {_WAY}")
    plain, wrappers = _peeled(model)
    _check(plain)
    parts = [(name, part) for name, part in plain.named_modules() if _inside(part) is not None]
    if parts or any(_compiled(part) for part in plain.modules()):
        plain = copied(plain)  # which leaves out what `Module.compile` made
        for name, part in parts:
            wrappers.append(f"{type(part).__name__} ({name})")
            replace_module(plain, plain.get_submodule(name), _peeled(plain.get_submodule(name))[0])
    if wrappers and model not in _TOLD:
        _TOLD.add(model)
        log.warning(
            "%s taken off: what is worked on is the %s inside, and results are plain networks",
            ", ".join(wrappers),
            type(plain).__name__,
        )
    return plain


def _classes(module: nn.Module) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}


def _peeled(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the network inside all of its wrappers, and the names of their classes."""
    names = []
    while (inner := _inside(module)) is not None:
        names.append(type(module).__name__)
        module = inner
    return module, names


def _inside(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper wraps, or None where it is none."""
    if type(module).__module__.startswith("torch.nn.modules"):  # nearly all of them
        return None
    attribute = next((_WRAPPERS[name] for name in _classes(module) if name in _WRAPPERS), None)
    return None if attribute is None else getattr(module, attribute)


def _compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _check(model: nn.Module) -> None:
    """Refuse forms of a network that have no layers to work on."""
    for name, module in model.named_modules():
        what = f"{f'layer {name!r}' if name else 'the network'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise DecompositionError(f"{what}, a program of TorchScript without layers to change; {_WAY}")
        if type(module).__module__.startswith(_QUANTISED):
            raise DecompositionError(
                f"{what}, quantised by torch.ao: its weights are integers that no format can replace; give "
                "the network before it was quantised (precisions= quantises here)"
            )
        if _classes(module) & _SHARDED:
            raise DecompositionError(
                f"{what}, whose parameters are shards; gather its full state dict, load it into the plain "
                "nn.Module and give that"
            )
    parts = (type(module) for module in model.modules())
    layers = any(cls.__module__.startswith("torch.nn.modules") for cls in parts if cls is not nn.Module)
    if isinstance(model, torch.fx.GraphModule) and not layers and any(p.ndim > 1 for p in model.parameters()):
        raise DecompositionError(
            f"the network is a {type(model).__name__}, an exported program, which has parameters but no "
            f"layers; {_WAY}"
        )
