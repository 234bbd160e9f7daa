"""Change modules in place: wrappers, copies, replaced layers and their attributes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)

# By name: importing the classes would import torch's compiler and its distributed packages.
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
    """Return the plain network inside wrappers (torch.compile, data parallel, averaged), and say so once."""
    if not isinstance(model, nn.Module):
        raise DecompositionError(f"a network is a torch.nn.Module, got a {type(model).__name__}; {_WAY}")
    plain, wrappers = _peeled(model)
    _check(plain)
    parts = [(name, part) for name, part in plain.named_modules() if _inside(part) is not None]
    if parts or any(_compiled(part) for part in plain.modules()):
        plain = copied(plain)  # drops the compiled forward of `Module.compile`
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
    """Return the module inside a wrapper; None if it is no wrapper."""
    if type(module).__module__.startswith("torch.nn.modules"):  # fast path: no wrapper
        return None
    attribute = next((_WRAPPERS[name] for name in _classes(module) if name in _WRAPPERS), None)
    return None if attribute is None else getattr(module, attribute)


def _compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _check(model: nn.Module) -> None:
    """Refuse networks without layers to change: scripted, exported, quantised or sharded ones."""
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


_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_NAMED = 5


def warn_lost_attributes(model: nn.Module, replaced: Mapping[str, nn.Module]) -> None:
    """Warn of hooks and attributes of replaced layers, once for each network."""
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
    """List the hooks and attributes of a layer that a fresh one of its class lacks, for messages."""
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


Module = TypeVar("Module", bound=nn.Module)


class _ComputedByValue(TorchFunctionMode):
    """Copies tensors that a forward computed by value, wherever deepcopy meets one: torch copies leaves."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copied(model: Module) -> Module:
    """Return a deep copy of a module, computed tensors by value; functions, such as hooks, are not copied."""
    try:
        with _ComputedByValue():
            return copy.deepcopy(model)
    except Exception as error:  # whatever an attribute's own code raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DecompositionError(
            f"the {type(model).__name__} cannot be copied: {_uncopyable(model)} ({reason}); keep only "
            "modules, tensors and plain values as attributes, or define __deepcopy__ or __getstate__ for it"
        ) from error


def _uncopyable(model: nn.Module) -> str:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            try:
                with _ComputedByValue():
                    copy.deepcopy(value)
            except Exception:  # whatever the attribute's own code raises
                where = f"layer {name!r}" if name else "it"
                return f"{where} holds {attribute!r}, a {type(value).__name__}"
    return "one of its modules refuses"


def remove_parametrizations(module: nn.Module) -> None:
    """Make parametrised tensors plain parameters; torch's own function changes copies, too."""
    training = module.training
    module.eval()  # in training every call would advance spectral norm's power iteration
    values = {
        name: (getattr(module, name).detach(), any(p.requires_grad for p in parametrization.parameters()))
        for name, parametrization in module.parametrizations.items()  # type: ignore[union-attr,operator]
    }
    module.train(training)
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]
    for name, (value, trained) in values.items():
        setattr(module, name, nn.Parameter(value, requires_grad=trained))


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    places = [
        (parent, attribute)
        for parent in model.modules()
        for attribute, child in parent._modules.items()
        if child is old
    ]
    for parent, attribute in places:
        setattr(parent, attribute, new)
