"""Copying a model and replacing modules inside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from decomposition.errors import DecompositionError

Module = TypeVar("Module", bound=nn.Module)


class _ComputedByValue(TorchFunctionMode):
    """Copies tensors that a forward computed by value, detached from their graph.

    torch copies parameters and other leaves alone. Wherever `copy.deepcopy` meets a tensor, in lists,
    dataclasses or objects that are hooks, it calls `Tensor.__deepcopy__`.
    """

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
    """Return a deep copy of a module.

    Tensors that its forward computed and kept anywhere among its attributes, which torch refuses to copy
    (features in a list, the weight of `torch.nn.utils.weight_norm`), are copied by value. Functions are not
    copied: a hook that writes into a list outside writes there for the copy, too.
    """
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
    """Return which attribute cannot be copied, for messages."""
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
    """Make parametrised tensors of a module plain parameters of their present values, in place.

    torch's own function does not serve: it changes the class, which copies of the module share.
    """
    training = module.training
    module.eval()  # spectral norm is computed a step further at every call in training
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
    """Put `new` everywhere in `model` where `old` is, under all its names."""
    places = [
        (parent, attribute)
        for parent in model.modules()
        for attribute, child in parent._modules.items()
        if child is old
    ]
    for parent, attribute in places:
        setattr(parent, attribute, new)
